"""Cut a model on an A rank: its layers run without their experts and hand over what the experts need.

Port       the forward of a layer's experts: records (x, idx, w) and returns zeros; the layer then yields its base, and
           h = base + y is made behind it. Where the output is not base + y, it suspends and returns y instead.
Boundary   the forward of a layer of this A group: suspends the coroutine until the next segment's input is there.
Foreign    the forward of a decoder layer of another A group: returns its input untouched.

Shapes: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointError

from lightning_afd.errors import PlanError
from lightning_afd.model.compiled import inside_compiled
from lightning_afd.model.coroutine import Coroutine, Host, Segment
from lightning_afd.model.logits_leaf import LogitsLeaf
from lightning_afd.model.probe import (
    check_returns,
    detached,
    distance_from_identity,
    hidden_of,
    more_than_hidden,
    normal,
    other_uses,
    uses_logits,
)
from lightning_afd.model.recompute import Recompute, heavy_parts, recomputed
from lightning_afd.model.router_output import kind_of
from lightning_afd.model.shared_port import SharedPort
from lightning_afd.model.split import DecoderLayer, MoELayer


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """Where this A group's part of a step begins and ends."""

    host: Host
    segments: tuple[int, ...]
    """Attention segments of this group, ascending."""
    may_suspend_inside: bool
    """Whether the experts' sums come back to the rank that dispatched (one group per role)."""
    only_hidden: bool
    """Whether other ranks run parts of the same step, past layers of which they see the hidden states only."""
    stands_in: bool
    """Whether the tail runs here and may ask for the router logits of layers of other ranks."""
    recompute: Recompute = "none"
    """What a layer computes again in its backward."""

    def leave(self, layer: int, name: str, hidden: Tensor) -> Tensor:
        """Behind MoE layer `layer`: wait for the next segment's input where this group owns it, else go on."""
        coroutine = self.host.require(name)
        if layer + 1 in self.segments or layer == self.segments[-1]:
            hidden = coroutine.suspend(name, hidden.shape)
        coroutine.reseed(layer + 1)
        return hidden


class Port:
    """The `forward` of a layer's experts."""

    def __init__(self, cut: Cut, layer: MoELayer) -> None:
        self._cut = cut
        self._name = layer.name
        self._index = layer.index
        self._forward = layer.experts.forward
        self.may_suspend = cut.may_suspend_inside and layer.shared is None
        """Whether the layer may wait at its experts, where it is not additive."""
        self.additive: bool | None = None
        """Whether the layer's output is base + experts; None as long as nobody has looked."""
        self.chained = False
        """Whether the layer uses the router logits again behind the router."""
        self.probe: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        x, idx_TK, w_TK = self._bind(args, kwargs)
        return self._run(x.reshape(-1, x.shape[-1]), idx_TK, w_TK).reshape(x.shape)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The three arguments, whatever their names; the experts' ids are the integers."""
        if kwargs:
            args = inspect.signature(self._forward).bind(*args, **kwargs).args
        x, idx, w = args
        idx, w = (w, idx) if idx.is_floating_point() else (idx, w)
        return x, idx.reshape(-1, idx.shape[-1]), w.reshape(-1, w.shape[-1])

    def _run(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> Tensor:
        host = self._cut.host
        if host.in_backward:
            self._compare(host.recomputed, idx_TK)
            return torch.zeros_like(x_TH)
        coroutine = host.require(f"the experts of {self._name}")
        segment = self._record(coroutine.segment, x_TH, idx_TK, w_TK)
        if self.additive is not True and self.may_suspend and coroutine.may_suspend():
            segment.inside = True
            segment.y_TH = coroutine.suspend(f"the experts of {self._name}", x_TH.shape)
            return segment.y_TH
        zeros_TH = torch.zeros_like(x_TH)
        if self.additive is None:
            self.probe = zeros_TH.requires_grad_()
        return zeros_TH

    def _compare(self, segment: Segment | None, idx_TK: Tensor) -> None:
        if segment is None or segment.layer != self._index or segment.idx_TK is None:
            return
        error = CheckpointError(
            f"{self._name} chose other experts in its recompute than in its forward: the gradients would be wrong; "
            "make the routing deterministic, or recompute attention only"
        )
        if idx_TK.shape != segment.idx_TK.shape:
            raise error
        self._cut.host.refuse_if((idx_TK != segment.idx_TK).any(), error)

    def _record(self, segment: Segment, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> Segment:
        if segment.layer != self._index or segment.x_TH is not None:
            raise PlanError(
                f"{self._name} (MoE layer {self._index}) was called where MoE layer {segment.layer} was expected: "
                "a step must run the model's layers once, in order"
            )
        segment.x_TH, segment.idx_TK, segment.w_TK = x_TH, idx_TK, w_TK
        segment.with_grad = torch.is_grad_enabled()
        if torch.is_autocast_enabled(x_TH.device.type):
            segment.wire_dtype = torch.get_autocast_dtype(x_TH.device.type)
        return segment


class Boundary:
    """The `forward` of a decoder layer with experts that this A group owns."""

    def __init__(self, cut: Cut, layer: MoELayer, port: Port, shared: SharedPort | None = None) -> None:
        self._cut = cut
        self._layer = layer
        self._port = port
        self._shared = shared
        forward = layer.layer.forward
        self._original = recomputed(forward) if cut.recompute == "full" else forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        coroutine = self._cut.host.require(self._layer.name)
        out = self._run(coroutine, args, kwargs)
        segment = coroutine.segment
        self._refuse_more(out)
        segment.base = hidden_of(out)
        segment.chained = self._port.chained
        self._check(segment)
        if self._shared is not None and segment.w_TK is not None:
            segment.w_TK = self._shared.add_weight(segment.w_TK)
        if segment.inside and segment.layer != self._cut.segments[-1]:
            h = segment.base.detach()
            h = h.requires_grad_() if torch.is_grad_enabled() else h
            coroutine.segment = Segment(layer=segment.layer + 1, h=h)
            coroutine.reseed(segment.layer + 1)
        else:
            h = self._cut.leave(self._layer.index, self._layer.name, segment.base)
        return (h, *out[1:]) if isinstance(out, tuple) else h

    def _refuse_more(self, out: Any) -> None:
        if isinstance(out, tuple) and self._cut.only_hidden:
            raise PlanError(more_than_hidden(self._layer.name))

    @property
    def suspends(self) -> bool:
        """Whether the layer is suspended at its experts; False as long as nobody has looked."""
        return self._port.additive is False

    def _run(self, coroutine: Coroutine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer; its first call also finds out whether its output is base + experts, as h = base + y assumes.

        The derivative of the output with respect to what the port returned must be the identity.
        """
        if self._port.additive is not None:
            return self._original(*args, **kwargs)
        grad, segment = torch.is_grad_enabled(), coroutine.segment
        if self._port.may_suspend and grad is False:
            return self._original(*args, **kwargs)
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = tree_map_only(Tensor, normal, (args, kwargs))
            out = self._original(*args, **kwargs)
            self._check(segment)
            # A checkpointed layer may be computed again: ports stay silent, and no collector of the step is set.
            with self._cut.host.backward():
                contextvars.Context().run(self._probe, segment, out)
        return out if grad else detached(out)

    def _check(self, segment: Segment) -> None:
        if segment.x_TH is None:
            raise PlanError(f"{self._layer.name} did not call its experts: a layer must route in every step")
        if torch.is_grad_enabled() and not segment.with_grad:
            raise PlanError(
                f"{self._layer.name} runs its experts without gradients: activation checkpointing with "
                "use_reentrant=True (or no_grad) around the layer cannot be split; use use_reentrant=False"
            )

    def _probe(self, segment: Segment, out: Any) -> None:
        port = self._port
        returned, port.probe = (segment.y_TH if segment.inside else port.probe), None
        assert returned is not None
        error = distance_from_identity(hidden_of(out), returned) + other_uses(out, returned)
        port.additive = error < 1e-2
        port.chained = uses_logits(hidden_of(out), segment)
        if not port.additive and not segment.inside:
            raise PlanError(
                f"{self._layer.name} is not additive: its output is not (rest of the layer) + (routed experts), the "
                f"derivative with respect to the experts differs from the identity by {error:.3g}; such a layer is "
                "suspended at its experts, which needs groups=1 or (1, f), no activation checkpointing around the "
                "experts and shared_experts='attention'"
            )
        if self._shared is not None:
            self._shared.probe(segment, out, list(self._layer.layer.parameters()))


class Foreign:
    """The `forward` of a decoder layer of another A group: only the order of layers, and router logits, remain."""

    def __init__(self, cut: Cut, layer: DecoderLayer) -> None:
        self._cut = cut
        self._layer = layer
        self._beside = [] if layer.moe is None else beside_experts(layer.moe)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, kwargs.get("hidden_states"), *kwargs.values())
        hidden = next((a for a in given if isinstance(a, Tensor) and a.is_floating_point()), None)
        if hidden is None:
            raise PlanError(f"{self._layer.name} was called without hidden states")
        if self._layer.moe is None:
            return hidden
        if self._cut.stands_in:
            self._stand_in(self._cut.host.require(self._layer.name), self._layer.moe.index)
        return self._cut.leave(self._layer.moe.index, self._layer.name, hidden)

    def _stand_in(self, coroutine: Coroutine, index: int) -> None:
        """Let the router's hooks (transformers' collector) see a leaf that is filled before the tail runs."""
        if coroutine.routing is None:
            return
        own, *others = coroutine.routing.output
        leaf = torch.full_like(own, float("nan")).requires_grad_()
        output = (leaf, *(torch.zeros_like(other) if isinstance(other, Tensor) else other for other in others))
        coroutine.stand_ins[index] = leaf
        for module in self._beside:
            if kind_of(module) in coroutine.routing.kinds:
                restore = patch_forward(module, lambda *args, **kwargs: output)
                try:
                    module(leaf)
                finally:
                    restore()


def install(cut: Cut, decoder: Sequence[DecoderLayer]) -> Callable[[], None]:
    """Patch the layers of an A rank in place (no wrapper modules, all names stay); returns what undoes it."""
    undo: list[Callable[[], None]] = []
    if cut.only_hidden:
        for layer in decoder:
            check_returns(layer)
    for layer in decoder:
        if layer.segment not in cut.segments:
            undo.append(patch_forward(layer.layer, Foreign(cut, layer)))
        elif layer.moe is not None:
            port, shared = Port(cut, layer.moe), None
            if layer.moe.shared is not None:
                shared = SharedPort(cut.host, layer.name, layer.moe.shared)
                undo += [shared.install(), patch_forward(layer.moe.shared.module, shared)]
            for module in beside_experts(layer.moe):
                # First of all hooks: those that collect router logits shall see the leaf, also where they are older.
                undo.append(module.register_forward_hook(LogitsLeaf(cut.host, layer.moe), prepend=True).remove)
            undo.append(patch_forward(layer.layer, Boundary(cut, layer.moe, port, shared)))
            undo.append(patch_forward(layer.moe.experts, port))
            if cut.recompute == "attention":
                parts = heavy_parts(layer.layer, layer.moe.experts, layer.moe.num_experts)
                mine = [part for part in parts if not isinstance(part.forward, SharedPort)]
                undo += [patch_forward(part, recomputed(part.forward)) for part in mine]
    return lambda: [step() for step in undo] and None


def suspended_layers(root: nn.Module) -> list[str]:
    """Names of the layers of this rank that wait inside themselves for their experts, as found in their first call."""
    boundaries = [(name, vars(module).get("forward")) for name, module in root.named_modules()]
    return [name for name, forward in boundaries if isinstance(forward, Boundary) and forward.suspends]


def forbid(decoder: Sequence[DecoderLayer]) -> Callable[[], None]:
    """Make calls of the model on an F rank, which holds only experts, say so; returns what undoes it."""
    undo = [patch_forward(layer.layer, _Forbidden(layer.name)) for layer in decoder]
    return lambda: [step() for step in undo] and None


class _Forbidden:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Host().require(self._name)


def patch_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give one instance another forward; the returned function puts back what was there, on the instance or not."""
    before = module.__dict__.pop("forward", None)
    module.forward = forward  # type: ignore[assignment]

    def restore() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    return restore


def beside_experts(layer: MoELayer) -> list[nn.Module]:
    """Submodules of the layer neither inside the experts, nor around them, nor compiled: the router is among them."""
    inside = set(layer.experts.modules()) | inside_compiled(layer.layer)
    around = {module for module in layer.layer.modules() if layer.experts in module.modules()}
    return [module for module in layer.layer.modules() if module not in inside | around]
