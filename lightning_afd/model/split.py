"""Find the Mixture-of-Experts layers of any module.

They are found by their experts: modules with the weights of all experts in one tensor, as transformers 5 stores them.
A module that is built otherwise names its layers itself, in a method

    def afd_layers(self) -> list[tuple[nn.Module, nn.Module | None]]:
        return [(layer, layer.experts) for layer in self.layers]  # None for a dense layer

in the order of execution, dense layers included. Experts must follow the contract of model/experts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.model.compiled import refuse_compiled, refuse_compiled_routers
from lightning_afd.model.experts_module import check_experts, is_experts
from lightning_afd.model.shared import INSTEAD, SharedExperts, find_shared
from lightning_afd.placement import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class MoELayer:
    """One decoder layer with routed experts."""

    index: int
    """Number among the MoE layers, from 0: the layer number of actions, errors and pictures."""
    name: str
    """Qualified name of the decoder layer inside the root module."""
    layer: nn.Module
    """The decoder layer whose output is the residual stream."""
    experts: nn.Module
    """The routed experts inside it: `experts(x_TH, idx_TK, w_TK) -> y_TH`."""
    num_experts: int
    """E, routed experts of this layer."""
    top_k: int
    """K, experts per token; 0 where the layer does not say."""
    shared: SharedExperts | None = None
    """Its shared experts, where F ranks compute them."""


def find_moe_layers(root: nn.Module) -> tuple[MoELayer, ...]:
    """List the MoE layers of `root` in the order of execution; raises PlanError where there are none or too many."""
    refuse_compiled(root)
    named = _named_by_user(root)
    found = _searched(root) if named is None else {name: experts for name, _, experts in named if experts is not None}
    if not found:
        raise PlanError(f"{type(root).__name__} {_why_none(root)}")
    layers: dict[str, MoELayer] = {}
    for layer_name, experts in found.items():
        check_experts(experts)
        layer = root.get_submodule(layer_name)
        layers[layer_name] = MoELayer(
            index=len(layers),
            name=layer_name,
            layer=layer,
            experts=experts,
            num_experts=num_experts_of(experts),
            top_k=_top_k_of(layer),
        )
        refuse_compiled_routers(layer_name, layer, experts, layers[layer_name].num_experts)
    if named is None:
        _check_one_stack(layers)
    _check_top_k(layers.values())
    return tuple(layers.values())


def with_shared_experts(root: nn.Module, layers: Sequence[MoELayer]) -> tuple[MoELayer, ...]:
    """The layers with their shared experts, for F ranks; raises PlanError where none has any, or F ranks can't."""
    found = tuple(replace(layer, shared=find_shared(layer.name, layer.layer, layer.experts)) for layer in layers)
    moved = [layer for layer in found if layer.shared is not None]
    if not moved:
        raise PlanError("shared_experts='ffn': this model has none, no layer has a module of that name")
    inside = {id(module) for layer in moved for module in layer.shared.module.modules()}  # type: ignore[union-attr]
    elsewhere = {id(p) for module in root.modules() if id(module) not in inside for p in module._parameters.values()}
    seen: set[int] = set()
    for layer in moved:
        mine = {id(parameter) for parameter in layer.shared.module.parameters()}  # type: ignore[union-attr]
        if mine & (elsewhere | seen):
            raise PlanError(f"the shared experts of {layer.name} are tied to parameters outside of them: {INSTEAD}")
        seen |= mine
    return found


@dataclass(frozen=True)
class Placed:
    """What an experts module remembers after the split (model/place.py)."""

    num_experts: int
    place: str
    """Which rank of which layout the rest of the model was left to."""
    layout: Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayer:
    """One layer of the stack that holds the MoE layers; a dense one belongs to the segment of the next MoE layer."""

    name: str
    layer: nn.Module
    segment: int
    """Attention segment that runs it; the number of MoE layers for dense layers behind the last one."""
    moe: MoELayer | None
    """Its experts, if it has any."""


def decoder_layers(root: nn.Module, layers: Sequence[MoELayer]) -> tuple[DecoderLayer, ...]:
    """All layers of the stack, dense ones included, in the order of execution."""
    named = _named_by_user(root)
    stack_name = layers[0].name.rpartition(".")[0]
    by_name = {layer.name: layer for layer in layers}
    found, segment = [], 0
    stack = [(f"{stack_name}.{child}", module) for child, module in root.get_submodule(stack_name).named_children()]
    for name, module in stack if named is None else [(name, module) for name, module, _ in named]:
        moe = by_name.get(name)
        found.append(DecoderLayer(name=name, layer=module, segment=segment, moe=moe))
        segment += moe is not None
    return tuple(found)


def wants_router_logits(root: nn.Module) -> bool:
    """Whether the model's loss may use router logits: its config says so, or it has no config that could."""
    configs = [config for module in root.modules() if (config := getattr(module, "config", None)) is not None]
    said = [config.output_router_logits for config in configs if hasattr(config, "output_router_logits")]
    return any(said) if said or any(hasattr(config, "model_type") for config in configs) else True


def _named_by_user(root: nn.Module) -> list[tuple[str, nn.Module, nn.Module | None]] | None:
    """Names, layers and experts as a method `afd_layers` of some module says; None where there is no such method."""
    module = next((module for module in root.modules() if callable(getattr(module, "afd_layers", None))), None)
    if module is None:
        return None
    names = {id(module): name for name, module in root.named_modules()}
    pairs = list(module.afd_layers())
    lost = [type(part).__name__ for pair in pairs for part in pair if part is not None and id(part) not in names]
    if lost:
        raise PlanError(f"afd_layers of {type(module).__name__} returned modules that are not in the model: {lost}")
    return [(names[id(layer)], layer, experts) for layer, experts in pairs]


def _searched(root: nn.Module) -> dict[str, nn.Module]:
    """Experts by the name of their decoder layer."""
    found: dict[str, nn.Module] = {}
    for name, experts in root.named_modules():
        if is_experts(experts):
            layer = _decoder_layer_of(root, name)
            if layer in found:
                raise PlanError(f"layer {layer} has two modules with routed experts: only one per layer can be split")
            found[layer] = experts
    return found


def _why_none(root: nn.Module) -> str:
    others = [module for module in root.modules() if not is_experts(module)]
    strange = sorted({type(module).__name__ for module in others if "Experts" in type(module).__name__})
    if strange:
        return (
            f"has experts that cannot be split, {', '.join(strange)}: a split needs experts(x, ids, weights) with "
            "gate_up_proj (or up_proj) and down_proj [experts, ..., ...] and nothing else to train"
        )
    return (
        "has no routed experts: no submodule holds stacked expert weights (down_proj and gate_up_proj or up_proj with "
        "the expert as dimension 0). Use a Mixture-of-Experts model of transformers, or another strategy for a dense "
        "one"
    )


def _decoder_layer_of(root: nn.Module, experts_name: str) -> str:
    """The element of the outermost nn.ModuleList on the way from `root` to the experts."""
    parts = experts_name.split(".")
    for depth in range(len(parts) - 1):
        if isinstance(root.get_submodule(".".join(parts[:depth])), nn.ModuleList):
            return ".".join(parts[: depth + 1])
    raise PlanError(
        f"the experts {experts_name} belong to no list of decoder layers: expected an nn.ModuleList above them"
    )


def num_experts_of(experts: nn.Module) -> int:
    """Routed experts of the whole layer, also where only some of them are left on this rank."""
    mark = mark_of(experts)
    return next(experts.parameters()).shape[0] if mark is None else mark.num_experts


def mark_of(experts: nn.Module) -> Placed | None:
    """What an experts module remembers of its placement."""
    return getattr(experts, "afd_placed", None)


def _top_k_of(layer: nn.Module) -> int:
    for module in layer.modules():
        for name in ("top_k", "num_experts_per_tok"):
            value = getattr(module, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return 0


def _check_one_stack(layers: dict[str, MoELayer]) -> None:
    stacks = sorted({name.rpartition(".")[0] for name in layers})
    if len(stacks) > 1:
        raise PlanError(
            f"routed experts in {len(stacks)} stacks of layers ({', '.join(stacks)}): one stack can be split"
        )


def _check_top_k(layers: Iterable[MoELayer]) -> None:
    for layer in layers:
        if layer.top_k > layer.num_experts:
            raise PlanError(
                f"layer {layer.name} routes each token to {layer.top_k} of {layer.num_experts} experts: "
                f"choose top_k <= {layer.num_experts}"
            )
