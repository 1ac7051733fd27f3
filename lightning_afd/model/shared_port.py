"""What stands for a layer's shared experts on an A rank where F ranks compute them: zeros, and one more routing weight.

Shapes: T tokens, H hidden, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.model.coroutine import Host, Segment
from lightning_afd.model.probe import direction_of, distance_from_identity, hidden_of, other_uses
from lightning_afd.model.shared import INSTEAD, SharedExperts

_TOLERANCE = 1e-2


class SharedPort:
    """The `forward` of a layer's shared experts; the layer runs from its begin to its end without being suspended."""

    def __init__(self, host: Host, name: str, shared: SharedExperts) -> None:
        self._host, self._name, self._shared = host, name, shared
        self._known = False
        """Whether the first call has found out how the layer adds its shared experts."""
        self._gated = False
        self._given: Tensor | None = None
        """Input of this call."""
        self._returned: Tensor | None = None
        self._gate: Tensor | None = None
        """What the gate returned in this call, [.., 1]."""

    def install(self) -> Callable[[], None]:
        """Watch the gate; returns what undoes it."""
        gate = self._shared.gate
        return (lambda: None) if gate is None else gate.register_forward_hook(self._watch).remove

    def _watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self._host.active is not None and not self._host.in_backward:
            self._gate = output

    def __call__(self, x: Tensor, *others: Any, **more: Any) -> Tensor:
        if others or more:
            raise PlanError(f"{self._name} calls its shared experts with more than hidden states: {INSTEAD}")
        zeros = torch.zeros_like(x)
        if self._host.in_backward:
            segment = self._host.recomputed
            probed = not self._known if segment is None else segment.probed
            return zeros.requires_grad_(probed)  # checkpointing compares what a recompute saves with the forward
        segment = self._host.require(f"the shared experts of {self._name}").segment
        if self._given is not None:
            raise PlanError(f"{self._name} calls its shared experts more than once: {INSTEAD}")
        self._given = x
        if not self._known:
            segment.probed, self._returned = True, zeros.requires_grad_()
        return zeros

    def add_weight(self, w_TK: Tensor) -> Tensor:
        """The routing weights of the layer's call that ended, and behind them that of the shared experts."""
        given, gate, self._given, self._gate = self._given, self._gate, None, None
        if given is None:
            raise PlanError(f"{self._name} did not call its shared experts: a layer must do so in every step")
        if not self._gated:
            return torch.cat([w_TK, w_TK.new_ones(len(w_TK), 1)], 1)
        if gate is None:
            raise PlanError(f"{self._name} did not call the gate of its shared experts: {INSTEAD}")
        return torch.cat([w_TK, gate.sigmoid().reshape(-1, 1).to(w_TK.dtype)], 1)

    def probe(self, segment: Segment, out: Any, parameters: Sequence[nn.Parameter]) -> None:
        """In the first call: the layer must return rest + g * shared(x), with the x of its routed experts.

        `parameters` are those of the layer.
        """
        returned, self._returned = self._returned, None
        if returned is None or self._given is None or segment.x_TH is None:
            return  # reported by add_weight
        if not self._same_input(self._given, segment.x_TH, [*parameters, segment.h]):
            raise PlanError(f"{self._name} gives its shared experts another input than its routed experts: {INSTEAD}")
        error = distance_from_identity(hidden_of(out), returned)
        if error > _TOLERANCE and self._gate is not None:
            self._gated = True
            error = distance_from_identity(hidden_of(out), returned, self._gate.sigmoid().reshape(-1, 1))
        if error + other_uses(out, returned) > _TOLERANCE:
            raise PlanError(
                f"{self._name} does not add its shared experts as they are, nor times the sigmoid of a gate: {INSTEAD}"
            )
        self._known = True

    def _same_input(self, given: Tensor, x_TH: Tensor, leaves: Sequence[Tensor | None]) -> bool:
        """Equal values, and equal derivatives with respect to what both came from."""
        if given.numel() != x_TH.numel() or not torch.equal(given.reshape(x_TH.shape), x_TH):
            return False
        sources = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad and not leaf.is_meta]
        if not sources or not given.requires_grad or not x_TH.requires_grad:
            return given.requires_grad == x_TH.requires_grad
        pairs = zip(_derivative(given, sources), _derivative(x_TH, sources), strict=True)
        return all(_close(a, b) for a, b in pairs)


def _derivative(tensor: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(tensor, leaves, direction_of(tensor), retain_graph=True, allow_unused=True)


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max()) if a.numel() else True
