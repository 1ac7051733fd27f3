"""Leave each rank only the parameters that it owns; the others stay under their names, without storage.

A parameter of another rank lies on the meta device. On A groups other than 0, modules of the user that run before the
first layer keep a copy of their parameters, which is not trained: what it computes there is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_afd.model.experts import shard_experts
from lightning_afd.model.port import patch_forward
from lightning_afd.model.split import DecoderLayer, MoELayer, Placed, mark_of
from lightning_afd.placement import ExpertMap


def is_owned(parameter: Tensor) -> bool:
    """Whether this rank trains a parameter of a placed model."""
    return not is_foreign(parameter) and not getattr(parameter, "afd_copy", False)


def is_foreign(tensor: Tensor) -> bool:
    """Whether another rank owns a parameter or buffer, so that it has no storage here."""
    return bool(getattr(tensor, "afd_foreign", False))


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
    """Make an A rank of this process: its layers without their routed experts, and on A group 0 all that is dense.

    `segments` are the attention segments of its group; the group that has the tail, segment L, is group 0.
    """
    gone = [layer.moe.experts for layer in decoder if layer.moe is not None]
    gone += [layer.layer for layer in decoder if layer.segment not in segments]
    tail = sum(layer.moe is not None for layer in decoder)
    if tail not in segments:
        gone += _only_copies_outside(root, decoder)
    _to_meta(gone)


def keep_experts(root: nn.Module, owned: Sequence[MoELayer], expert_maps: Sequence[ExpertMap], index: int) -> None:
    """Make F rank number `index` of a group of this process: only its own experts of the group's layers stay."""
    for layer in owned:
        shard_experts(layer.experts, expert_maps[layer.index].rank_to_experts(index))
    _to_meta([root], keep={id(parameter) for layer in owned for parameter in layer.experts.parameters()})


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
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)


def mark_placed(layers: Iterable[MoELayer], place: str) -> None:
    """Remember on the experts themselves that they were placed, so that a later fit or test finds it."""
    for layer in layers:
        layer.experts.afd_placed = Placed(layer.num_experts, place)  # type: ignore[assignment]


def placed_at(layers: Iterable[MoELayer]) -> str | None:
    """Where these layers were placed before; None for a whole model."""
    marks = [mark.place for layer in layers if (mark := mark_of(layer.experts)) is not None]
    return marks[0] if marks else None


def _only_copies_outside(root: nn.Module, decoder: Sequence[DecoderLayer]) -> list[nn.Module]:
    """Outside of the stack, mark what stays as untrained copies; returns embeddings and what is as wide as one."""
    inside = {id(module) for layer in decoder for module in layer.layer.modules()}
    outside = [module for module in root.modules() if id(module) not in inside]
    vocabularies = {module.num_embeddings for module in outside if isinstance(module, nn.Embedding)}
    gone = []
    for module in outside:
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
