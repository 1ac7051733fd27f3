"""Leave each rank only the parameters that it owns; the others stay under their names, without storage.

A parameter of another rank lies on the meta device. Outside of the stack of layers, what is registered before the stack
and embeddings belong to segment 0, everything else to the tail. Ranks without that segment keep a copy, which is not
trained, of what is not as wide as a vocabulary: user code may run it, but its result must not be used there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.model.experts_module import rows_of, shard_experts
from lightning_afd.model.port import patch_forward
from lightning_afd.model.split import DecoderLayer, MoELayer, Placed, mark_of
from lightning_afd.placement import Layout


def is_owned(parameter: Tensor) -> bool:
    """Whether this rank trains a parameter of a placed model."""
    return not is_foreign(parameter) and not getattr(parameter, "afd_copy", False)


def is_foreign(tensor: Tensor) -> bool:
    """Whether another rank owns a parameter or buffer, so that it has no storage here."""
    return bool(getattr(tensor, "afd_foreign", False))


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter holds routed experts, of which this rank has some that no other has."""
    return rows_of(parameter) is not None


def dense_parameters(root: nn.Module) -> list[nn.Parameter]:
    """The parameters that this rank trains and of which `Layout.copies_of` names the ranks that have them, too."""
    return [parameter for _, parameter in owned_parameters(root) if not is_expert(parameter)]


def segments_of_dense(root: nn.Module, decoder: Sequence[DecoderLayer]) -> dict[nn.Parameter, int]:
    """The attention segment of each dense parameter that this rank trains: the first one that has it, whose backward is
    the last to add to its gradient. Where user code does otherwise cannot be seen here.
    """
    parts = [(parameter, layer.segment) for layer in decoder for parameter in layer.layer.parameters()]
    for module, tail in _outside(root, decoder):
        parts += [(parameter, _tail_of(decoder) if tail else 0) for parameter in module.parameters(recurse=False)]
    first: dict[nn.Parameter, int] = {}
    for parameter, segment in parts:
        first[parameter] = min(segment, first.get(parameter, segment))
    return {parameter: first[parameter] for parameter in dense_parameters(root)}


def is_first_copy(parameter: Tensor, layout: Layout, rank: int) -> bool:
    """Whether a parameter that this rank trains is to be counted, or saved, here and not on an earlier rank."""
    return is_expert(parameter) or layout.copies_of(rank)[0] == rank


def owned_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that this rank trains."""
    return ((name, parameter) for name, parameter in root.named_parameters() if is_owned(parameter))


def foreign_names(root: nn.Module) -> set[str]:
    """Names, tied ones included, of the parameters that other ranks own."""
    return {name for name, p in root.named_parameters(remove_duplicate=False) if not is_owned(p)}


def owned_bytes(root: nn.Module) -> int:
    """Bytes of all parameters that this process really holds."""
    return sum(p.numel() * p.element_size() for p in root.parameters() if p.device.type != "meta")


def keep_attention(root: nn.Module, decoder: Sequence[DecoderLayer], segments: Sequence[int]) -> None:
    """Make an A rank of this process, which runs `segments`: their layers without routed experts, and what is outside
    of the stack as far as it belongs to them.
    """
    gone = [layer.moe.experts for layer in decoder if layer.moe is not None]
    gone += [layer.moe.shared.module for layer in decoder if layer.moe is not None and layer.moe.shared is not None]
    gone += [layer.layer for layer in decoder if layer.segment not in segments]
    _to_meta([*gone, *_only_copies_outside(root, decoder, segments)])


def keep_experts(root: nn.Module, owned: Sequence[MoELayer], expert_maps: Sequence[ExpertMap], index: int) -> None:
    """Make F rank number `index` of a group of this process: only its own experts of the group's layers stay.

    Shared experts that F ranks compute stay on all of them.
    """
    _to_meta([root], keep=_shard(owned, expert_maps, index))


def keep_all_but_other_experts(owned: Sequence[MoELayer], expert_maps: Sequence[ExpertMap], index: int) -> None:
    """Make rank number `index` of a collocated layout of this process: everything stays but experts of other ranks."""
    _shard(owned, expert_maps, index)


def keep_experts_and_tail(
    root: nn.Module,
    decoder: Sequence[DecoderLayer],
    owned: Sequence[MoELayer],
    expert_maps: Sequence[ExpertMap],
    index: int,
) -> None:
    """The same for an F rank that runs the tail: trailing layers and what is outside of the stack stay, too."""
    keep, tail = _shard(owned, expert_maps, index), _tail_of(decoder)
    gone = [layer.layer for layer in decoder if layer.segment != tail]
    _to_meta([*gone, *_only_copies_outside(root, decoder, (tail,))], keep)


def check_head_is_apart(root: nn.Module, decoder: Sequence[DecoderLayer]) -> None:
    """Raise PlanError where a weight of the tail is also one of segment 0 (a tied embedding)."""
    names = {id(module): name for name, module in root.named_modules()}
    inputs = {id(p): names[id(m)] for m, tail in _outside(root, decoder) if not tail for p in m.parameters(False)}
    for module in (module for module, tail in _outside(root, decoder) if tail):
        for parameter in module.parameters(recurse=False):
            if id(parameter) in inputs:
                raise PlanError(
                    f"head='ffn' cannot move {names[id(module)]} away from attention ranks, because its weight is also "
                    f"that of {inputs[id(parameter)]}: untie them (tie_word_embeddings=False) or use head='attention'"
                )


def _shard(owned: Sequence[MoELayer], expert_maps: Sequence[ExpertMap], index: int) -> set[int]:
    """Cut the experts of F rank number `index` out; returns the ids of their parameters, and of shared experts."""
    kept = []
    for layer in owned:
        shard_experts(layer.experts, expert_maps[layer.index].rank_to_experts(index))
        kept += list(layer.experts.parameters())
        kept += [] if layer.shared is None else list(layer.shared.module.parameters())
    return {id(parameter) for parameter in kept}


def stub_embeddings(root: nn.Module) -> Callable[[], None]:
    """Let embeddings without storage return zeros of the right shape; returns what undoes it."""
    undo = [
        patch_forward(module, _EmbeddingStub(module))
        for module in root.modules()
        if isinstance(module, nn.Embedding) and module.weight.device.type == "meta"
    ]
    return lambda: [step() for step in undo] and None


class _EmbeddingStub:
    def __init__(self, module: nn.Embedding) -> None:
        self._width, self._dtype = module.embedding_dim, module.weight.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        zeros = torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)
        zeros.requires_grad_(torch.is_grad_enabled())
        zeros.afd_copy = True  # type: ignore[attr-defined]  # a loss that uses it is found out by its gradient
        return zeros


def mark_placed(layers: Iterable[MoELayer], place: str, layout: Layout) -> None:
    """Remember on the experts themselves that they were placed, so that a later fit or test finds it."""
    for layer in layers:
        layer.experts.afd_placed = Placed(layer.num_experts, place, layout)  # type: ignore[assignment]


def placed_at(layers: Iterable[MoELayer]) -> str | None:
    """Where these layers were placed before; None for a whole model."""
    marks = [mark.place for layer in layers if (mark := mark_of(layer.experts)) is not None]
    return marks[0] if marks else None


def placed_layout(root: nn.Module) -> Layout | None:
    """The layout for which a module was split before; None for a whole one."""
    marks = (mark_of(part) for part in root.modules())
    return next((mark.layout for mark in marks if mark is not None), None)


def _tail_of(decoder: Sequence[DecoderLayer]) -> int:
    return sum(layer.moe is not None for layer in decoder)


def _outside(root: nn.Module, decoder: Sequence[DecoderLayer]) -> list[tuple[nn.Module, bool]]:
    """Modules outside of the stack, and whether they belong to the tail (else to segment 0)."""
    stack = {id(layer.layer) for layer in decoder}
    inside = {id(module) for layer in decoder for module in layer.layer.modules()}
    found, seen = [], False
    for module in root.modules():
        if id(module) in inside:
            seen = True
        else:
            around = not stack.isdisjoint(map(id, module.modules()))
            found.append((module, (seen or around) and not isinstance(module, nn.Embedding)))
    return found


def _only_copies_outside(root: nn.Module, decoder: Sequence[DecoderLayer], segments: Sequence[int]) -> list[nn.Module]:
    """Outside of the stack, mark what belongs to other segments than `segments` as untrained copies; returns what goes:
    embeddings and what is as wide as a vocabulary.
    """
    gone = []
    outside = _outside(root, decoder)
    vocabularies = {module.num_embeddings for module, _ in outside if isinstance(module, nn.Embedding)}
    for module in [module for module, tail in outside if (_tail_of(decoder) if tail else 0) not in segments]:
        if isinstance(module, nn.Embedding) or getattr(module, "out_features", None) in vocabularies:
            gone.append(module)
        else:
            for parameter in module.parameters(recurse=False):
                parameter.afd_copy = True  # type: ignore[attr-defined]
    return gone


def _to_meta(roots: Iterable[nn.Module], keep: Iterable[int] = ()) -> None:
    """Replace parameters by equally named ones without storage; tied parameters, also between roots, stay tied."""
    kept, replaced = set(keep), dict[int, nn.Parameter]()
    for module in (module for root in roots for module in root.modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in kept:
                continue
            if id(parameter) not in replaced:
                meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                vars(meta).update(vars(parameter))  # such as a mark by which configure_optimizers sorts parameters
                meta.afd_foreign = True  # type: ignore[attr-defined]
                replaced[id(parameter)] = meta
                kept.add(id(meta))
            module._parameters[name] = replaced[id(parameter)]
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device.type == "meta":
                buffer.afd_foreign = True
