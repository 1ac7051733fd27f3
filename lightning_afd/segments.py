"""One micro-batch on an A rank: its coroutine, and the autograd graph cut at each MoE layer.

Segment l (0..L) ends with the output `base` of MoE layer l without its experts; the next one starts at the leaf
h = base + y. So the graph of a step is L + 1 separate pieces, and dY of layer l is the gradient of h of segment l + 1.
A layer whose output is not base + y is suspended at its experts instead: y is a leaf inside segment l, h is the layer's
output, and dY is the gradient of that leaf.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_afd.errors import PlanError
from lightning_afd.model.backward import Ends, backward, fitting, give_zeros, with_logits
from lightning_afd.model.coroutine import Coroutine, Host, Segment
from lightning_afd.model.graph import shared_by, uses_copies
from lightning_afd.model.input_first import Indivisible, WeightGradients, input_gradients, modules_called
from lightning_afd.model.router_output import RouterOutput
from lightning_afd.model.z_loss import add_z_gradient, refuse_other_than_logits


@dataclass(frozen=True, kw_only=True, eq=False)
class UserStep:
    """One micro-batch of work for an A rank."""

    function: Callable[[], Any]
    """Runs the user's step on this micro-batch and returns what it returned."""
    around: Callable[[], AbstractContextManager[Any]]
    """Context of the step (autocast), entered at each resume."""
    weight: float = 0.0
    """Weight of this micro-batch's loss in the loss of the global batch; 0 for masked micro-batches."""
    loss_scale: float = 1.0
    """Factor of this loss in backward, so that small gradients survive half precision."""
    loss_of: Callable[[Any], Tensor | None] = lambda result: None
    """Picks the loss out of what the step returned."""
    router_z_loss: float = 0.0
    """Coefficient of the router z-loss of each layer that is added to this loss, in backward only."""
    seed: int | None = None
    """Random numbers of this micro-batch; None: those of the process."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a segment's backward hands to the layer before: dY for its experts, dh for its attention."""

    dY_TH: Tensor
    dh_TH: Tensor


class MicroBatch:
    """Forward and backward of one micro-batch, segment by segment.

    With `input_first` a backward leaves the gradients of parameters to `put_off`, where that is possible.
    """

    def __init__(
        self, host: Host, step: UserStep, layers: int, segments: tuple[int, ...], *, input_first: bool = False
    ) -> None:
        self._host = host
        self._step = step
        self._layers = layers
        self._mine = segments
        self._input_first = input_first
        self._coroutine = Coroutine(host, step.function, step.around, step.seed)
        self._segments: dict[int, Segment] = {}
        self.z_losses: list[Tensor] = []
        """Weighted z-losses of the layers whose backward has run."""
        self.put_off: dict[int, WeightGradients] = {}
        """What the backwards of segments have left to do."""

    @property
    def result(self) -> Any:
        """What the user's step returned."""
        return self._coroutine.result

    @property
    def stand_ins(self) -> dict[int, Tensor]:
        """Leaves of the router logits of layers on other ranks, by layer."""
        return self._coroutine.stand_ins

    @property
    def routing(self) -> RouterOutput | None:
        """What the routers of own layers returned last."""
        return self._coroutine.routing

    def start(self, routing: RouterOutput | None) -> None:
        """Run a step of which only the tail is here up to that; `routing` is the pattern for all router logits."""
        self._coroutine.routing = routing
        self._coroutine.resume()

    def fill_in(self, layer: int, logits_TE: Tensor) -> None:
        """Give the stand-in of a router on another rank its values; nothing happens where nobody asked for one."""
        leaf = self.stand_ins.get(layer)
        if leaf is not None:
            with torch.no_grad():
                leaf.copy_(logits_TE.view_as(leaf))

    def forward(self, layer: int, y_TH: Tensor | None, base_TH: Tensor | None) -> Segment | None:
        """Run segment `layer`; None after the tail.

        `y_TH` are the experts' sums of the layer before, `base_TH` its base where another rank computed it.
        """
        coroutine = self._coroutine
        if layer == 0:
            coroutine.resume()
        else:
            if not coroutine.started:
                coroutine.resume()
            self._check_alive(layer)
            self._enter(layer, y_TH, base_TH)
        if coroutine.finished != (layer == self._layers):
            self._refuse(layer)
        self._segments[layer] = segment = coroutine.segment
        if coroutine.finished:
            coroutine.segment = Segment(layer=layer)  # it must not keep the tail's activations
        if layer == self._mine[-1] and layer != self._layers and not segment.inside:
            coroutine.close()
        return None if layer == self._layers else segment

    def hand_over(self, y_TH: Tensor, base_TH: Tensor | None) -> Tensor:
        """End the user's code behind the last layer; returns the hidden states [T, H] for the tail on another rank."""
        before = self._before(self._layers)
        if before is not None and before.inside:
            self._resume_inside(before, y_TH)
            assert before.base is not None
            h = before.base.detach()
        else:
            h = self._hidden(before, y_TH, base_TH)
        self._coroutine.close()
        self._segments[self._layers] = Segment(layer=self._layers, h=h)
        return h.reshape(-1, h.shape[-1])

    def take_back(self, dh_TH: Tensor) -> Gradients:
        """The counterpart of `hand_over` in backward: the gradient that the tail's rank has found."""
        segment = self._segments.pop(self._layers)
        assert segment.h is not None
        return self._split(self._layers, dh_TH.reshape(segment.h.shape))

    def tail_backward(self) -> Gradients:
        """Backward of the loss through the tail; zeros for a masked micro-batch."""
        loss = self._step.loss_of(self._coroutine.result)
        self._coroutine.result = tree_map_only(Tensor, Tensor.detach, self._coroutine.result)
        self._shares_graph(loss)
        segment = self._segments.pop(self._layers)
        if loss is not None and self._step.weight != 0.0:
            with self._host.backward():
                self._pass_back(segment, [(loss, self._seed(loss))])
        elif loss is not None:
            give_zeros(loss)
        return self._gradients(segment)

    def _seed(self, loss: Tensor) -> Tensor:
        """The gradient that backward starts from; infinite where a scaled loss leaves the range of its dtype."""
        wide = torch.promote_types(loss.dtype, torch.float32)
        return torch.full_like(loss, self._step.weight * self._step.loss_scale, dtype=wide).to(loss.dtype)

    def backward(self, layer: int, dx_TH: Tensor, dw_TK: Tensor, dh_TH: Tensor) -> Gradients | None:
        """Backward of segment `layer`; None for segment 0, which has no layer before."""
        self._shares_graph()
        segment = self._segments.pop(layer)
        assert segment.base is not None and segment.x_TH is not None and segment.w_TK is not None
        self._add_z_loss(segment)
        pairs = fitting([(segment.base, dh_TH), (segment.x_TH, dx_TH), (segment.w_TK, dw_TK)])
        with self._host.backward(segment):
            self._pass_back(segment, with_logits(segment, pairs))
        return None if segment.h is None else self._gradients(segment)

    def _pass_back(self, segment: Segment, ends: Ends) -> None:
        """Backward from all outputs of a segment; segment 0 has no input that anybody waits for."""
        shared, layer = bool(self._host.shares_graph), segment.layer
        if self._input_first and segment.h is not None and layer not in self._host.undivided:
            try:
                self.put_off[layer] = self._input_gradients(segment, ends)
                return
            except Indivisible as reason:
                self._never_divide(layer, str(reason))
        backward(ends, retain_graph=shared)

    def _input_gradients(self, segment: Segment, ends: Ends) -> WeightGradients:
        if self._host.shares_graph:
            raise Indivisible("has operations in common with another one")
        if segment.layer in self._host.divided:
            return input_gradients(ends)
        with modules_called() as recomputed:
            found = input_gradients(ends)
        if recomputed:
            self._never_divide(segment.layer, "computes its forward again in backward, which would be done twice")
        self._host.divided.add(segment.layer)
        return found

    def _never_divide(self, layer: int, reason: str) -> None:
        if not self._host.undivided:
            warnings.warn(
                f"the backward of attention segment {layer} is not divided into gradients of inputs and of weights, "
                f"because it {reason}: the schedule finds less to fill its gaps with; the numbers are the same",
                stacklevel=2,
            )
        self._host.undivided.add(layer)

    def _add_z_loss(self, segment: Segment) -> None:
        """As if the user had added coefficient * z-loss to this micro-batch's loss: weighted and scaled like it."""
        step = self._step
        if step.router_z_loss == 0.0 or step.weight == 0.0:
            return
        if segment.layer not in self._host.routers_checked:
            refuse_other_than_logits(segment)
            self._host.routers_checked.add(segment.layer)
        factor = step.weight * step.router_z_loss
        self.z_losses.append(step.weight * add_z_gradient(segment.logits[0][1], factor * step.loss_scale))

    def close(self) -> None:
        """Drop the coroutine and all activations."""
        self._coroutine.close()
        self._segments.clear()

    def logits_leaf(self, layer: int) -> Tensor | None:
        """The leaf of the router logits of an own layer, whose gradient may come from another rank."""
        logits = self._segments[layer].logits
        return logits[0][1] if logits else None

    def _check_alive(self, layer: int) -> None:
        if self._coroutine.finished:
            self._refuse(layer)

    def _enter(self, layer: int, y_TH: Tensor | None, base_TH: Tensor | None) -> None:
        """Give the coroutine what it waits for: the experts' sums inside a layer, or the hidden states behind it."""
        before = self._before(layer)
        if before is not None and before.inside:
            assert y_TH is not None
            self._resume_inside(before, y_TH)
            return
        h = self._hidden(before, y_TH, base_TH)
        self._coroutine.segment = Segment(layer=layer, h=h.requires_grad_() if torch.is_grad_enabled() else h)
        self._coroutine.resume(h)

    def _before(self, layer: int) -> Segment | None:
        """The own segment before `layer`, if it is one; nobody needs it again where there is no backward."""
        return self._segments.get(layer - 1) if torch.is_grad_enabled() else self._segments.pop(layer - 1, None)

    def _resume_inside(self, before: Segment, y_TH: Tensor) -> None:
        assert before.x_TH is not None
        y = y_TH.reshape(self._coroutine.shape).to(before.x_TH.dtype)
        self._coroutine.resume(y.requires_grad_() if torch.is_grad_enabled() else y)

    def _hidden(self, before: Segment | None, y_TH: Tensor | None, base_TH: Tensor | None) -> Tensor:
        """Hidden states behind a layer: its base, own or received, and its experts' sums."""
        if base_TH is None:
            assert before is not None and before.base is not None
            base_TH = before.base.detach()
        h = base_TH.reshape(self._coroutine.shape)
        return h if y_TH is None else (h + y_TH.reshape(h.shape)).to(h.dtype)

    def _gradients(self, segment: Segment) -> Gradients:
        h = segment.h
        assert h is not None
        dh = torch.zeros_like(h) if h.grad is None else h.grad
        h.grad = None
        return self._split(segment.layer, dh)

    def _split(self, layer: int, dh: Tensor) -> Gradients:
        """The gradient of the input of segment `layer`, for the base and for the experts of the layer before."""
        before = self._segments.get(layer - 1)
        dY = dh
        if before is not None and before.inside:
            assert before.base is not None and before.y_TH is not None
            with self._host.backward():
                found = torch.autograd.grad(before.base, before.y_TH, dh, retain_graph=True, allow_unused=True)[0]
            dY = torch.zeros_like(before.y_TH) if found is None else found
            if before.y_TH.grad is not None:  # what the layer made of it is used behind the layer, too
                dY = dY + before.y_TH.grad
        return Gradients(dY.reshape(-1, dY.shape[-1]), dh.reshape(-1, dh.shape[-1]))

    def _shares_graph(self, loss: Tensor | None = None) -> bool:
        """Whether segments have operations in common, found out once; their graphs then outlive the first backward."""
        if self._host.shares_graph is None:
            segments = list(self._segments.values())
            self._host.shares_graph = shared_by(segments, loss) is not None
            if len(self._mine) <= self._layers and (self._host.shares_graph or uses_copies(segments, loss)):
                raise PlanError(
                    f"segments {', '.join(str(layer) for layer in self._mine)} of the step use something learned, "
                    "beside their hidden states, that lies on ranks of other segments: such a model needs groups=1 "
                    "or (1, f), and head='attention'"
                )
        return self._host.shares_graph

    def _refuse(self, layer: int) -> None:
        if self._coroutine.finished:
            last = self._coroutine.segment.layer
            raise PlanError(
                f"the step ended in MoE layer {last} of {self._layers}: every step must run all layers once"
            )
        raise PlanError(f"the step went on to MoE layer {layer} after its last one, {self._layers - 1}")
