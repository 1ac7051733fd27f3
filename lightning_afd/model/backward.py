"""Backward of an attention segment: from all of its outputs at once, and what a masked loss gets instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_afd.model.coroutine import Segment

Ends = Sequence[tuple[Tensor, Tensor]]
"""Outputs of a segment, each with its gradient."""


def fitting(pairs: Ends) -> list[tuple[Tensor, Tensor]]:
    """Outputs that need a gradient, with their gradients in the output's shape and dtype."""
    return [(out, grad.to(out.dtype).reshape(out.shape)) for out, grad in pairs if out.requires_grad]


def with_logits(segment: Segment, pairs: Ends) -> Ends:
    """Outputs and the router logits with their gradients: from the loss and, by no more than these paths, from the
    layer itself.

    One backward from all outputs follows: two would round twice where the model computes in lower precision.
    """
    leaves = [leaf for _, leaf in segment.logits]
    inside: Sequence[Tensor | None] = [None] * len(leaves)
    if segment.chained and leaves and pairs:
        outs, grads = zip(*pairs, strict=True)
        inside = torch.autograd.grad(outs, leaves, grads, retain_graph=True, allow_unused=True)
    found = list(pairs)
    for (logits, leaf), grad in zip(segment.logits, inside, strict=True):
        parts = [part for part in (leaf.grad, grad) if part is not None]
        leaf.grad = None  # the layer's backward adds to it once more
        found += [(logits, sum(parts[1:], parts[0]))] if parts else []
    return found


def backward(pairs: Ends, *, retain_graph: bool = False) -> None:
    """Add the gradients of everything that leads to these outputs."""
    if pairs:
        outs, grads = zip(*pairs, strict=True)
        torch.autograd.backward(outs, grads, retain_graph=retain_graph)


def give_zeros(loss: Tensor) -> None:
    """Give the leaves of a masked loss zero gradients, not None and not 0 x NaN: decay and momentum still act."""
    nodes, seen = [loss.grad_fn], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]  # type: ignore[union-attr]
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
