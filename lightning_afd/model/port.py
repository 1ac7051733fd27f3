"""Run the user's own step as a coroutine that is suspended at each MoE layer.

Boundary   patches one decoder layer: runs it with the experts cut out, then suspends the coroutine until h = base + y.
Port       stands in for the layer's experts: records (x, idx, w) and returns zeros; it never sends and never suspends.
Coroutine  one micro-batch of the user's step inside a greenlet.
Host       knows which coroutine runs now; one per process.

Shapes: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_afd.errors import PlanError
from lightning_afd.model.context import context_state, difference
from lightning_afd.model.split import MoELayer


@dataclass(eq=False)
class Segment:
    """What attention segment `layer` leaves for its dispatch and its backward."""

    layer: int
    h: Tensor | None = None
    """Leaf input of the segment; None for segment 0."""
    base: Tensor | None = None
    """Output of the layer without its routed experts: residual stream and shared experts."""
    x_TH: Tensor | None = None
    idx_TK: Tensor | None = None
    w_TK: Tensor | None = None
    with_grad: bool = False
    """Whether the experts were called with gradients enabled."""
    wire_dtype: torch.dtype | None = None
    """Dtype in which x travels under autocast; None: as it is."""
    logits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Router logits of the graph, each with the leaf that the rest of the layer and the user's loss see instead."""
    logits_inside: bool = False
    """Whether the layer itself computes something, such as weights, from the logits that its router returned."""


class Coroutine:
    """One micro-batch of the user's step; `resume` runs it to the next MoE layer or to its end.

    `around` makes the context (autocast, grad mode) that is entered at each resume and left at each suspension.
    """

    def __init__(self, host: Host, step: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._host = host
        self._around = around
        self._greenlet = greenlet(step)
        self._greenlet.gr_context = contextvars.copy_context()
        self._outside: tuple[object, ...] = ()
        self.segment = Segment(layer=0)
        self.result: Any = None

    @property
    def finished(self) -> bool:
        return bool(self._greenlet.dead)

    def resume(self, h: Tensor | None = None) -> Segment:
        """Continue with the hidden states `h` (None at the start); returns the segment that ends here."""
        if h is not None:
            self.segment = Segment(layer=self.segment.layer + 1, h=h)
        segment = self.segment
        self._greenlet.parent = getcurrent()
        with self._around():
            self._outside = context_state()
            with self._host.running(self):
                out = self._greenlet.switch() if h is None else self._greenlet.switch(h)
        if self.finished:
            self.result = out
            self.segment = Segment(layer=segment.layer)
        return segment

    def suspend(self, layer_name: str) -> Tensor:
        """Called inside the coroutine: give control back until the layer's hidden states have arrived."""
        state = context_state()
        if state != self._outside:
            raise PlanError(
                f"the step holds a context at {layer_name} that would leak into other micro-batches "
                f"({difference(self._outside, state)}): leave it before the model is called; activation checkpointing "
                "belongs inside the layer's forward, with use_reentrant=False"
            )
        parent = self._greenlet.parent
        assert parent is not None
        return parent.switch()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End a suspended coroutine without running the rest of it."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)


class Host:
    """Which coroutine runs in this process, and whether a backward (recompute) runs instead."""

    def __init__(self) -> None:
        self.active: Coroutine | None = None
        self.in_backward = False
        self.probed: set[int] = set()
        self.logits_inside: set[int] = set()

    def running(self, coroutine: Coroutine) -> _Set:
        return _Set(self, "active", coroutine)

    def backward(self) -> _Set:
        """Context of a segment's backward: ports that are called by a recompute stay silent."""
        return _Set(self, "in_backward", True)

    def require(self, name: str) -> Coroutine:
        """The running coroutine; PlanError where a layer is called outside of a step."""
        if self.active is None:
            raise PlanError(
                f"{name} was called outside of a training, validation, test or predict step: "
                "its experts live on other ranks, so the model can only run inside a step of the Trainer"
            )
        return self.active


class _Set:
    """Set an attribute for the time of a with-block."""

    def __init__(self, target: object, name: str, value: object) -> None:
        self._target, self._name, self._value = target, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._target, self._name)
        setattr(self._target, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        setattr(self._target, self._name, self._before)


class Port:
    """The `forward` of a layer's experts on an A rank."""

    def __init__(self, host: Host, layer: MoELayer) -> None:
        self._host = host
        self._name = layer.name
        self._index = layer.index
        self.probe: Tensor | None = None

    def __call__(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> Tensor:
        zeros_TH = torch.zeros_like(x_TH)
        if self._host.in_backward:
            return zeros_TH
        segment = self._host.require(f"the experts of {self._name}").segment
        if segment.layer != self._index or segment.x_TH is not None:
            raise PlanError(
                f"{self._name} (MoE layer {self._index}) was called where MoE layer {segment.layer} was expected: "
                "a step must run the model's layers once, in order"
            )
        segment.x_TH, segment.idx_TK, segment.w_TK = x_TH, idx_TK, w_TK
        segment.with_grad = torch.is_grad_enabled()
        if torch.is_autocast_enabled(x_TH.device.type):
            segment.wire_dtype = torch.get_autocast_dtype(x_TH.device.type)
        if self._index not in self._host.probed:
            self.probe = zeros_TH.requires_grad_()
        return zeros_TH


class Boundary:
    """The `forward` of a decoder layer on an A rank."""

    def __init__(self, host: Host, layer: MoELayer, port: Port) -> None:
        self._host = host
        self._layer = layer
        self._port = port
        self._original = layer.layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        coroutine = self._host.require(self._layer.name)
        first = self._layer.index not in self._host.probed
        out = self._run_probed(coroutine, args, kwargs) if first else self._original(*args, **kwargs)
        coroutine.segment.base = _hidden(out)
        coroutine.segment.logits_inside = self._layer.index in self._host.logits_inside
        self._check(coroutine.segment)
        h = coroutine.suspend(self._layer.name)
        return (h, *out[1:]) if isinstance(out, tuple) else h

    def _check(self, segment: Segment) -> None:
        if segment.x_TH is None:
            raise PlanError(f"{self._layer.name} did not call its experts: a layer must route in every step")
        if torch.is_grad_enabled() and not segment.with_grad:
            raise PlanError(
                f"{self._layer.name} runs its experts without gradients: activation checkpointing with "
                "use_reentrant=True (or no_grad) around the layer cannot be split; use use_reentrant=False"
            )

    def _run_probed(self, coroutine: Coroutine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's first call: also refuse a layer whose output is not base + experts, as h = base + y assumes.

        The derivative of the output with respect to what the port returned must be the identity.
        """
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = tree_map_only(Tensor, _normal, (args, kwargs))
            out = self._original(*args, **kwargs)
            self._check(coroutine.segment)
            assert self._port.probe is not None
            # A checkpointed layer may be computed again: the port stays silent, and no collector of the step is set.
            with self._host.backward():
                probes = contextvars.Context()
                probes.run(self._refuse_unless_additive, _hidden(out), self._port.probe)
                if probes.run(_uses_logits, _hidden(out), coroutine.segment):
                    self._host.logits_inside.add(self._layer.index)
        self._port.probe = None
        self._host.probed.add(self._layer.index)
        return out if grad else _detached(out)

    def _refuse_unless_additive(self, base: Tensor, probe_TH: Tensor) -> None:
        v = torch.arange(base.numel(), device=base.device).cos().reshape(base.shape).to(base.dtype)
        dprobe = None
        if base.requires_grad:
            dprobe = torch.autograd.grad(base, probe_TH, v, create_graph=True, allow_unused=True)[0]
        dprobe = torch.zeros_like(probe_TH) if dprobe is None else dprobe
        error = (dprobe.reshape(-1).float() - v.reshape(-1).float()).abs().max().item() if v.numel() else 0.0
        if not error < 1e-2:
            raise PlanError(
                f"{self._layer.name} is not additive: its output is not (rest of the layer) + (routed experts), the "
                f"derivative with respect to the experts differs from the identity by {error:.3g}; attention and "
                "experts cannot be separated at this layer, train this model with another strategy"
            )
        if dprobe.requires_grad:  # such as a trainable scale that is 1 at the start
            raise PlanError(
                f"{self._layer.name} is not additive: it multiplies the output of its routed experts by something "
                "trainable, whose gradient would be lost; train this model with another strategy"
            )


def install(host: Host, layers: Iterable[MoELayer]) -> Callable[[], None]:
    """Patch the layers of an A rank in place (no wrapper modules, all names stay); returns what undoes it."""
    undo: list[Callable[[], None]] = []
    for layer in layers:
        port = Port(host, layer)
        for module in _beside_experts(layer):
            # First of all hooks: those that collect router logits shall see the leaf, also where they are older.
            undo.append(module.register_forward_hook(_LogitsLeaf(host, layer), prepend=True).remove)
        for module, forward in ((layer.layer, Boundary(host, layer, port)), (layer.experts, port)):
            undo.append(_patch(module, forward))
    return lambda: [step() for step in undo] and None


def forbid(layers: Iterable[MoELayer]) -> Callable[[], None]:
    """Make calls of the model on an F rank, which holds only experts, say so; returns what undoes it."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        Host().require(next(iter(layers)).name)

    undo = [_patch(layer.layer, refuse) for layer in layers]
    return lambda: [step() for step in undo] and None


def _patch(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give one instance another forward; the returned function puts back what was there, on the instance or not."""
    before = module.__dict__.pop("forward", None)
    module.forward = forward  # type: ignore[assignment]

    def restore() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    return restore


class _LogitsLeaf:
    """Hand the router's logits to the rest of the model as a leaf: an auxiliary loss stays in the tail segment."""

    def __init__(self, host: Host, layer: MoELayer) -> None:
        self._host = host
        self._layer = layer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        coroutine = self._host.active
        if coroutine is None or self._host.in_backward or not _is_routing(output, self._layer.num_experts):
            return output
        logits = output[0]
        leaf = logits.detach().requires_grad_()
        if coroutine.segment.layer == self._layer.index:
            coroutine.segment.logits.append((logits, leaf))
        return (leaf, *output[1:])


def _beside_experts(layer: MoELayer) -> list[nn.Module]:
    """Submodules of the layer that are neither inside the experts nor around them: the router is among them."""
    inside = set(layer.experts.modules())
    return [module for module in layer.layer.modules() if inside.isdisjoint(module.modules())]


def _is_routing(output: Any, num_experts: int) -> bool:
    """Whether a module's output is a router's: a tuple of logits [.., E] first and chosen experts (integers) behind."""
    if not isinstance(output, tuple) or not isinstance(output[0], Tensor):
        return False
    logits = output[0]
    chosen = any(isinstance(o, Tensor) and not o.is_floating_point() for o in output[1:])
    return chosen and logits.requires_grad and logits.dim() >= 2 and logits.shape[-1] == num_experts


def _uses_logits(base: Tensor, segment: Segment) -> bool:
    outs = [t.sum() for t in (base, segment.x_TH, segment.w_TK) if t is not None and t.requires_grad]
    leaves = [leaf for _, leaf in segment.logits]
    if not outs or not leaves:
        return False
    return any(g is not None for g in torch.autograd.grad(outs, leaves, retain_graph=True, allow_unused=True))


def _hidden(out: Any) -> Tensor:
    hidden = out[0] if isinstance(out, tuple) else out
    assert isinstance(hidden, Tensor)
    return hidden


def _normal(tensor: Tensor) -> Tensor:
    """A tensor that autograd can save, also where `tensor` was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _detached(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(o.detach() if isinstance(o, Tensor) else o for o in out)
    return out.detach()
