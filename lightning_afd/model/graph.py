"""Which parts of the autograd graph belong to more than one segment: layers that hand on more than hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from lightning_afd.model.coroutine import Segment


def shared_by(segments: Sequence[Segment], loss: Tensor | None) -> tuple[int, int] | None:
    """The first two segments (by layer) that have operations in common; None where each has a graph of its own.

    The loss belongs to the last one. Parameters, which all segments may use, don't count.
    """
    owners: dict[Node, int] = {}
    for segment in segments:
        ends = [segment.base, segment.x_TH, segment.w_TK, *(logits for logits, _ in segment.logits)]
        ends += [loss] if segment is segments[-1] else []
        for node in _operations(end for end in ends if end is not None):
            if owners.setdefault(node, segment.layer) != segment.layer:
                return owners[node], segment.layer
    return None


def _operations(ends: Iterable[Tensor]) -> set[Node]:
    found: set[Node] = set()
    waiting = [end.grad_fn for end in ends if end.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in found and not hasattr(node, "variable"):
            found.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return found
