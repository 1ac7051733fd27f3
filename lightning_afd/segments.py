"""One micro-batch on an A rank: its coroutine, and the autograd graph cut at each MoE layer.

Segment l (0..L) ends with the output `base` of MoE layer l without its experts; the next one starts at the leaf
h = base + y. So the graph of a step is L + 1 separate pieces, and dY of layer l is the gradient of h of segment l + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_afd.errors import PlanError
from lightning_afd.model.port import Coroutine, Host, Segment


@dataclass(frozen=True, kw_only=True, eq=False)
class UserStep:
    """One micro-batch of work for an A rank."""

    function: Callable[[], Any]
    """Runs the user's step on this micro-batch and returns what it returned."""
    around: Callable[[], AbstractContextManager[Any]]
    """Context of the step (autocast), entered at each resume."""
    weight: float = 0.0
    """Weight of this micro-batch's loss in the loss of the global batch; 0 for masked micro-batches."""
    loss_of: Callable[[Any], Tensor | None] = lambda result: None
    """Picks the loss out of what the step returned."""


class MicroBatch:
    """Forward and backward of one micro-batch, segment by segment."""

    def __init__(self, host: Host, step: UserStep) -> None:
        self._host = host
        self._step = step
        self._coroutine = Coroutine(host, step.function, step.around)
        self._segments: dict[int, Segment] = {}
        self._dh: Tensor | None = None

    def forward(self, layer: int, layers: int, y_TH: Tensor | None) -> Segment | None:
        """Run segment `layer` with the experts' sums of the layer before; None after the tail (segment `layers`)."""
        h = None if layer == 0 else self._join(self._segments[layer - 1], y_TH)
        if not torch.is_grad_enabled():  # evaluation
            self._segments.clear()
        segment = self._coroutine.resume(h)
        if self._coroutine.finished != (layer == layers):
            raise PlanError(
                f"the step ended in MoE layer {segment.layer} of {layers}: every step must run all layers once"
                if self._coroutine.finished
                else f"the step went on to MoE layer {segment.layer} after its last one, {layers - 1}"
            )
        self._segments[layer] = segment
        return None if layer == layers else segment

    @property
    def result(self) -> Any:
        """What the user's step returned."""
        return self._coroutine.result

    def tail_backward(self, layers: int) -> Tensor:
        """Backward of the loss through the tail; returns dY of the last MoE layer, zeros for a masked micro-batch."""
        segment = self._segments.pop(layers)
        loss = self._step.loss_of(self._coroutine.result)
        self._coroutine.result = tree_map_only(Tensor, Tensor.detach, self._coroutine.result)
        if loss is not None and self._step.weight != 0.0:
            with self._host.backward():
                torch.autograd.backward([loss], [torch.full_like(loss, self._step.weight)])
        elif loss is not None:
            _give_zeros(loss)
        return self._take_dh(segment)

    def backward(self, layer: int, dx_TH: Tensor, dw_TK: Tensor) -> Tensor | None:
        """Backward of segment `layer`; returns dY of the layer before (None for segment 0)."""
        segment = self._segments.pop(layer)
        assert segment.base is not None and segment.x_TH is not None and segment.w_TK is not None
        pairs = [(segment.base, self._dh), (segment.x_TH, dx_TH), (segment.w_TK, dw_TK)]
        if segment.logits_inside:  # then this completes the gradients of their leaves
            self._run_backward(pairs, retain_graph=True)
            pairs = []
        self._run_backward([*pairs, *((logits, leaf.grad) for logits, leaf in segment.logits)], retain_graph=False)
        return None if segment.h is None else self._take_dh(segment)

    def _run_backward(self, pairs: Sequence[tuple[Tensor, Tensor | None]], *, retain_graph: bool) -> None:
        """Backward from several outputs at once, leaving out those without gradient."""
        kept = [(out, grad) for out, grad in pairs if out.requires_grad and grad is not None]
        if kept:
            grads = [grad.to(out.dtype).reshape(out.shape) for out, grad in kept]
            with self._host.backward():
                torch.autograd.backward([out for out, _ in kept], grads, retain_graph=retain_graph)

    def close(self) -> None:
        """Drop the coroutine and all activations."""
        self._coroutine.close()
        self._segments.clear()
        self._dh = None

    def _join(self, segment: Segment, y_TH: Tensor | None) -> Tensor:
        base = segment.base
        assert base is not None
        h = base.detach()
        if y_TH is not None:
            h = (h + y_TH.reshape(h.shape)).to(h.dtype)
        return h.requires_grad_() if torch.is_grad_enabled() else h

    def _take_dh(self, segment: Segment) -> Tensor:
        h = segment.h
        assert h is not None
        self._dh = torch.zeros_like(h) if h.grad is None else h.grad
        h.grad = None
        return self._dh


def _give_zeros(loss: Tensor) -> None:
    """Give the leaves of a masked loss zero gradients, not None and not 0 x NaN: decay and momentum still act."""
    nodes, seen = [loss.grad_fn], {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
