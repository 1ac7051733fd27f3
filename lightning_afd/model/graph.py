"""Which parts of the autograd graph belong to more than one segment: layers that hand on more than hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from lightning_afd.model.coroutine import Segment


def ends_of(segment: Segment) -> list[Tensor]:
    """What the backward of a segment starts from."""
    ends = [segment.base, segment.x_TH, segment.w_TK, *(logits for logits, _ in segment.logits)]
    return [end for end in ends if end is not None]


def shared_by(segments: Sequence[Segment], loss: Tensor | None) -> tuple[int, int] | None:
    """The first two segments (by layer) that have operations in common; None where each has a graph of its own.

    The loss belongs to the last one. Parameters, which all segments may use, don't count.
    """
    owners: dict[Node, int] = {}
    for segment in segments:
        ends = ends_of(segment) + ([loss] if loss is not None and segment is segments[-1] else [])
        for node in _walk(ends)[0]:
            if owners.setdefault(node, segment.layer) != segment.layer:
                return owners[node], segment.layer
    return None


def uses_copies(segments: Sequence[Segment], loss: Tensor | None) -> bool:
    """Whether the gradients of segments or of the loss reach a parameter that is trained on other ranks."""
    ends = [end for segment in segments for end in ends_of(segment)] + ([] if loss is None else [loss])
    return any(getattr(leaf, "afd_copy", False) for leaf in _walk(ends)[1])


def leaves_of(tensors: Iterable[Tensor]) -> set[Tensor]:
    """The leaves that these tensors were computed from."""
    return set(_walk(tensors)[1])


def _walk(ends: Iterable[Tensor]) -> tuple[set[Node], list[Tensor]]:
    """The operations and the leaves that lead to these tensors."""
    leaves: dict[Node, Tensor] = {}
    operations: set[Node] = set()
    waiting = [end.grad_fn for end in ends if end.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in operations or node in leaves:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is None:
            operations.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
        else:
            leaves[node] = leaf
    return operations, list(leaves.values())
