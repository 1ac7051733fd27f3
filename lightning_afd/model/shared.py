"""Shared experts on F ranks: which module of a layer they are, and their computation beside the routed experts.

A layer whose output is rest + routed experts + g * shared(x), where g is 1 or the sigmoid of a gate with one column,
can leave its shared experts to F ranks: the rows of x travel there anyway. Each token's are computed by one of the F
ranks that the token visits; g travels as one more routing weight, and the sums that come back contain g * shared(x).

Shapes: T tokens, H hidden, S slots per token (top-k and one for the shared experts), R tokens whose shared experts this
rank computes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_afd.errors import PlanError
from lightning_afd.model.experts import Activations, Cotangents, ExpertShard, Once, gradient_of

SharedPlace = Literal["attention", "ffn"]
PLACES: tuple[SharedPlace, ...] = ("attention", "ffn")
INSTEAD = "choose shared_experts='attention'"
_NAME = re.compile(r"shared(_experts?|_mlp)?")
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedExperts:
    """What all tokens of a layer visit beside its routed experts."""

    module: nn.Module
    """Maps the routed experts' input [.., H] to [.., H]."""
    gate: nn.Module | None
    """The module with one output column beside it, whose sigmoid may weigh what it adds."""


def find_shared(name: str, layer: nn.Module, experts: nn.Module) -> SharedExperts | None:
    """The shared experts of layer `name`, if it has any: `shared_experts`, `shared_mlp` or `shared` beside its experts.

    Raises PlanError where F ranks could not compute them as the layer does.
    """
    around = [module for module in layer.modules() if any(part is experts for part in module.modules())]
    found = [
        (module, parent)
        for parent in around
        for child, module in parent.named_children()
        if _NAME.fullmatch(child) and module not in around and next(module.parameters(), None) is not None
    ]
    if not found:
        return None
    if len(found) > 1:
        raise PlanError(f"{name} has {len(found)} modules with shared experts, F ranks can take one: {INSTEAD}")
    module, parent = found[0]
    _check_stateless(name, module)
    gates = [child for child in parent.children() if isinstance(child, nn.Linear) and child.out_features == 1]
    return SharedExperts(module=module, gate=gates[0] if len(gates) == 1 else None)


def _check_stateless(name: str, module: nn.Module) -> None:
    """Replicas on F ranks must stay equal, and see no random numbers of their own."""
    if next(module.buffers(), None) is not None:
        raise PlanError(f"the shared experts of {name} have buffers, which F ranks would not keep equal: {INSTEAD}")
    if any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules()):
        raise PlanError(f"the shared experts of {name} have dropout, which belongs to attention ranks: {INSTEAD}")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What forward leaves to backward; y_RH is None where it is to be computed again."""

    experts: Once[Activations]
    token_R: Tensor
    x_RH: Tensor
    w_R: Tensor
    y_RH: Tensor | None


@dataclass(frozen=True, slots=True)
class _Pending:
    """What backward leaves to the weight gradient."""

    experts: Once[Cotangents]
    y_RH: Tensor
    dy_RH: Tensor


class WithShared:
    """Routed and shared experts of one layer on one F rank, called as an ExpertShard: the last slot is the shared one.

    Its id is 0 where this rank computes the token's shared experts, else -1. The module's own forward runs under
    autograd; its input gradient and its weight gradient are two passes, of which the second repeats the first one's way
    to the last matrix.
    """

    def __init__(self, experts: ExpertShard, module: nn.Module, *, recompute: bool = False) -> None:
        self._experts, self._module, self._recompute = experts, module, recompute

    @property
    def kernel(self) -> str:
        """As that of the routed experts."""
        return self._experts.kernel

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the layer's experts that this rank holds."""
        return self._experts.parameters() + list(self._module.parameters())

    def forward(
        self, x_TH: Tensor, idx_TS: Tensor, w_TS: Tensor, keep: bool = True
    ) -> tuple[Tensor, Once[_Kept] | None]:
        """Return the weighted sums [T, H] in x's dtype, and what backward needs; keep=False saves nothing."""
        y_TH, saved = self._experts.forward(x_TH, idx_TS[:, :-1], w_TS[:, :-1], keep)
        token_R = (idx_TS[:, -1] >= 0).nonzero().squeeze(1)
        x_RH, w_R = x_TH.index_select(0, token_R), w_TS[:, -1].index_select(0, token_R)
        with torch.set_grad_enabled(keep and not self._recompute):
            y_RH = self._run(x_RH, w_R)
        y_TH.index_add_(0, token_R, y_RH.detach())
        if saved is None:
            return y_TH, None
        return y_TH, Once(_Kept(saved, token_R, x_RH, w_R, None if self._recompute else y_RH))

    def backward(self, saved: Once[_Kept], dy_TH: Tensor) -> tuple[Tensor, Tensor, Once[_Pending]]:
        """Return dx [T, H], dw [T, S] (0 where another rank computed the slot) and the weight gradient's input."""
        kept = saved.take()
        dx_TH, dw_TK, pending = self._experts.backward(kept.experts, dy_TH)
        y_RH = kept.y_RH
        if y_RH is None:
            with torch.enable_grad():
                y_RH = self._run(kept.x_RH, kept.w_R)
        dy_RH = dy_TH.index_select(0, kept.token_R).to(y_RH.dtype)
        dx_RH, dw_R = torch.autograd.grad(y_RH, (kept.x_RH, kept.w_R), dy_RH, retain_graph=True)
        dx_TH.index_add_(0, kept.token_R, dx_RH)
        dw_T1 = dw_TK.new_zeros(len(dw_TK), 1).index_copy_(0, kept.token_R, dw_R[:, None])
        return dx_TH, torch.cat([dw_TK, dw_T1], 1), Once(_Pending(pending, y_RH, dy_RH))

    def weight_gradient(self, pending: Once[_Pending]) -> None:
        """Add this micro-batch's gradients to the parameters' grad: 0, never None, where no token came."""
        left = pending.take()
        self._experts.weight_gradient(left.experts)
        trainable = self._trainable()
        if trainable:
            made = torch.autograd.grad(left.y_RH, trainable, left.dy_RH, allow_unused=True)
            for parameter, gradient in zip(trainable, made, strict=True):
                if gradient is not None:
                    gradient_of(parameter).add_(gradient)
        self._zero_missing()

    def zero_missing_gradients(self) -> None:
        """Give every trainable parameter without a gradient one of zeros, for a step without any row."""
        self._experts.zero_missing_gradients()
        self._zero_missing()

    def _zero_missing(self) -> None:
        for parameter in self._trainable():
            gradient_of(parameter)

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _run(self, x_RH: Tensor, w_R: Tensor) -> Tensor:
        """w * shared(x) in x's dtype; in the half precision in which rows travel, as autocast does it on A ranks."""
        if torch.is_grad_enabled():
            x_RH.requires_grad_()
            w_R.requires_grad_()
        lower = x_RH.dtype in _AUTOCAST_DTYPES and next(self._module.parameters()).dtype != x_RH.dtype
        with torch.autocast(x_RH.device.type, dtype=x_RH.dtype if lower else None, enabled=lower):
            y_RH = self._module(x_RH)
        return (y_RH * w_R[:, None]).to(x_RH.dtype)
