"""Activation recompute on A ranks: what a layer saved for backward is computed again instead of kept.

"attention"  the parts of a layer beside its routed experts that hold weight matrices, the router excepted
"full"       the whole layer; the experts it chose are those of the forward, replayed where a router calls top-k

Nothing is sent in a recompute: ports stay silent in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_afd.errors import PlanError

Recompute = Literal["none", "attention", "full"]
CHOICES: tuple[Recompute, ...] = ("none", "attention", "full")

_CACHES = ("past_key_values", "past_key_value", "cache", "cache_params", "layer_past")


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` under activation checkpointing whenever gradients are recorded; its choice of experts is replayed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = {key: None if key in _CACHES else value for key, value in kwargs.items()}
        chosen: list[Tensor] = []
        return checkpoint(_replaying(forward, chosen), *args, use_reentrant=False, **kwargs)

    return run


def heavy_parts(layer: nn.Module, experts: nn.Module, router_width: int) -> list[nn.Module]:
    """Submodules of a layer, none inside another, that hold weight matrices but neither experts nor the router."""
    found: list[nn.Module] = []
    inside = set(experts.modules())

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if not inside.isdisjoint(child.modules()):
                if child not in inside:
                    visit(child)
            elif any(p.dim() == 2 and p.shape[0] != router_width for p in child.parameters()):
                found.append(child)

    visit(layer)
    return found


def _replaying(forward: Callable[..., Any], chosen: list[Tensor]) -> Callable[..., Any]:
    """The first call notes what top-k chose, the second one gets the same choice."""
    calls = [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        with _TopK(chosen, replay=calls[0] > 1):
            return forward(*args, **kwargs)

    return run


class _TopK(TorchFunctionMode):
    """Record the indices of every top-k, or replay them: ties and rounding cannot choose other experts."""

    def __init__(self, chosen: list[Tensor], *, replay: bool) -> None:
        super().__init__()
        self._chosen, self._replay, self._next = chosen, replay, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        if not self._replay:
            self._chosen.append(func(args[0].detach(), *args[1:], **kwargs).indices)
        if self._next >= len(self._chosen):
            raise PlanError("a layer chose experts more often in its recompute than in its forward")
        indices = self._chosen[self._next]
        self._next += 1
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        # The same operations in both calls: checkpointing compares what they save.
        return torch.return_types.topk((args[0].gather(dim, indices), indices))
