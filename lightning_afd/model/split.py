"""Find the Mixture-of-Experts layers of any module and leave each rank only what it owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.model.experts import is_experts, shard_experts
from lightning_afd.placement import ExpertMap


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


def find_moe_layers(root: nn.Module) -> tuple[MoELayer, ...]:
    """List the MoE layers of `root` in the order of execution; raises PlanError where there are none or too many."""
    found = [(name, module) for name, module in root.named_modules() if is_experts(module)]
    if not found:
        raise PlanError(
            f"{type(root).__name__} has no routed experts: no submodule holds stacked expert weights "
            "(down_proj and gate_up_proj or up_proj with the expert as dimension 0). "
            "Use a Mixture-of-Experts model of transformers, or another strategy for a dense one"
        )
    layers: dict[str, MoELayer] = {}
    for name, experts in found:
        layer_name = _decoder_layer_of(root, name)
        if layer_name in layers:
            raise PlanError(f"layer {layer_name} has two modules with routed experts: only one per layer can be split")
        layer = root.get_submodule(layer_name)
        layers[layer_name] = MoELayer(
            index=len(layers),
            name=layer_name,
            layer=layer,
            experts=experts,
            num_experts=_num_experts(experts),
            top_k=_top_k_of(layer),
        )
    _check_one_stack(layers)
    _check_top_k(layers.values())
    return tuple(layers.values())


def expert_parameters(layers: Iterable[MoELayer]) -> Iterator[nn.Parameter]:
    """All parameters of the routed experts of `layers`."""
    for layer in layers:
        yield from layer.experts.parameters()


def keep_attention(layers: Iterable[MoELayer]) -> None:
    """Make an A rank of this process: routed experts go to the meta device, everything else stays."""
    for layer in layers:
        _to_meta(layer.experts, keep=frozenset())


def keep_experts(root: nn.Module, layers: Sequence[MoELayer], expert_maps: Sequence[ExpertMap], index: int) -> None:
    """Make F rank number `index` of this process: only its own experts stay, all else goes to the meta device."""
    for layer, expert_map in zip(layers, expert_maps, strict=True):
        shard_experts(layer.experts, expert_map.rank_to_experts(index))
    _to_meta(root, keep=frozenset(id(parameter) for parameter in expert_parameters(layers)))


@dataclass(frozen=True)
class Placed:
    """What an experts module remembers after the split, so that a later fit or test finds it placed."""

    num_experts: int
    place: str
    """Which rank of which layout the rest of the model was left to."""


def mark_placed(layers: Iterable[MoELayer], place: str) -> None:
    """Remember on the modules themselves that they were placed."""
    for layer in layers:
        layer.experts.afd_placed = Placed(layer.num_experts, place)  # type: ignore[assignment]


def placed_at(layers: Iterable[MoELayer]) -> str | None:
    """Where these layers were placed before; None for a whole model."""
    marks = [mark.place for layer in layers if (mark := _mark(layer.experts)) is not None]
    return marks[0] if marks else None


def owned_bytes(root: nn.Module) -> int:
    """Bytes of all parameters that this process really holds."""
    return sum(p.numel() * p.element_size() for p in root.parameters() if p.device.type != "meta")


def _to_meta(root: nn.Module, *, keep: frozenset[int]) -> None:
    """Replace parameters by equally named ones without storage; tied parameters stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in keep:
                continue
            if id(parameter) not in replaced:
                meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                vars(meta).update(vars(parameter))  # such as a mark by which configure_optimizers sorts parameters
                replaced[id(parameter)] = meta
                keep = keep | {id(meta)}
            module._parameters[name] = replaced[id(parameter)]


def _decoder_layer_of(root: nn.Module, experts_name: str) -> str:
    """The element of the outermost nn.ModuleList on the way from `root` to the experts."""
    parts = experts_name.split(".")
    for depth in range(len(parts) - 1):
        if isinstance(root.get_submodule(".".join(parts[:depth])), nn.ModuleList):
            return ".".join(parts[: depth + 1])
    raise PlanError(
        f"the experts {experts_name} belong to no list of decoder layers: expected an nn.ModuleList above them"
    )


def _num_experts(experts: nn.Module) -> int:
    mark = _mark(experts)
    return next(experts.parameters()).shape[0] if mark is None else mark.num_experts


def _mark(experts: nn.Module) -> Placed | None:
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
