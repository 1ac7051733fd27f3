"""Experts of one MoE layer on one F rank: forward, input gradient and weight gradient as three separate calls.

Shapes: T tokens, K slots per token (top-k), H hidden, E experts of this shard, R rows = (token, slot) pairs sorted by
expert, Z width before the gate function, D width after it; I and O are input and output width of a projection.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_afd.errors import ScheduleError
from lightning_afd.model.experts_module import Flags, check_experts, flags_of
from lightning_afd.model.grouped import Rows, grouped_linear, grouped_outer_, sort_rows

_GROUPED_DTYPES = (torch.bfloat16,)
_GROUPED_MAJORS = (9, 10)  # compute capabilities for which torch has CUTLASS kernels
_ALIGNMENT = 16  # bytes; F.grouped_mm refuses other row strides

Payload = TypeVar("Payload")


class Once(Generic[Payload]):
    """Holds what one action leaves to the next; taking it a second time is a ScheduleError."""

    def __init__(self, payload: Payload) -> None:
        self._payload: Payload | None = payload

    def take(self) -> Payload:
        """Return the payload and let go of it, so that its tensors are freed as early as possible."""
        payload, self._payload = self._payload, None
        if payload is None:
            raise ScheduleError("these expert activations were used before: run each backward action once")
        return payload


@dataclass(frozen=True, slots=True)
class Activations:
    """What forward leaves to backward: rows, input x_TH, routing weights w_TK, values before the gate z_RZ.

    z_RZ is None where it is to be computed again.
    """

    rows: Rows
    x_TH: Tensor
    w_TK: Tensor
    z_RZ: Tensor | None


@dataclass(frozen=True, slots=True)
class Cotangents:
    """What backward leaves to the weight gradient: input and output gradient of both projections.

    Those of the down projection are h_RD and w_R * dy_TH[token_R].
    """

    rows: Rows
    x_TH: Tensor
    dz_RZ: Tensor
    h_RD: Tensor
    dy_TH: Tensor
    w_R: Tensor


class Projection:
    """One of the two linear maps of all experts of a shard, with the copy of its weights in the compute dtype."""

    def __init__(self, module: nn.Module, name: str, flags: Flags) -> None:
        self._module, self._name = module, name
        self._transposed, self._has_bias = flags.is_transposed, flags.has_bias
        self._copies: dict[str, tuple[tuple[object, ...], Tensor]] = {}

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, [E, I, O] if the module is transposed, else [E, O, I]."""
        return self._module.get_parameter(self._name)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias parameter [E, O], if the module has biases."""
        return self._module.get_parameter(f"{self._name}_bias") if self._has_bias else None

    def parameters(self) -> list[nn.Parameter]:
        """Weight and, where there is one, bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def forward(self, x_RI: Tensor, rows: Rows) -> Tensor:
        """Map sorted rows [R, I] to [R, O], bias included."""
        y_RO = grouped_linear(x_RI, self._weight_EIO(x_RI.dtype), rows)
        bias_RO = self.bias_rows(rows, x_RI.dtype)
        return y_RO if bias_RO is None else y_RO.add_(bias_RO)

    def input_gradient(self, dy_RO: Tensor, rows: Rows) -> Tensor:
        """Map gradients of the output rows [R, O] to gradients of the input rows [R, I]."""
        return grouped_linear(dy_RO, self._weight_EIO(dy_RO.dtype).transpose(1, 2), rows)

    def weight_gradient_(self, x_RI: Tensor, dy_RO: Tensor, rows: Rows) -> None:
        """Add the gradient of the weight to the parameter's grad, zeros where an expert has no rows."""
        if self.weight.requires_grad:
            left, right = (x_RI, dy_RO) if self._transposed else (dy_RO, x_RI)
            grouped_outer_(gradient_of(self.weight), left, right, rows)

    def bias_gradient_(self, dy_RO: Tensor, scale_R: Tensor, rows: Rows) -> None:
        """Add the scaled column sums of dy to the bias's grad, as a thin GEMM: no atomics, hence reproducible."""
        if self.bias is None or not self.bias.requires_grad:
            return
        sums_E8O = dy_RO.new_zeros(len(self.bias), 8, dy_RO.shape[1])  # 8 columns for the alignment of grouped_mm
        grouped_outer_(sums_E8O, scale_R.to(dy_RO.dtype)[:, None].expand(-1, 8).contiguous(), dy_RO, rows)
        gradient_of(self.bias).add_(sums_E8O[:, 0])

    def bias_rows(self, rows: Rows, dtype: torch.dtype) -> Tensor | None:
        """The bias of each row's expert [R, O]."""
        bias = self.bias
        if bias is None:
            return None
        return self._cast("bias", bias, dtype).index_select(0, rows.expert_R) if len(bias) else None

    def drop_copies(self) -> None:
        """Forget the copies in the compute dtype."""
        self._copies.clear()

    def _weight_EIO(self, dtype: torch.dtype) -> Tensor:
        weight = self._cast("weight", self.weight, dtype)
        return weight if self._transposed else weight.transpose(1, 2)

    def _cast(self, what: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        if parameter.dtype == dtype:
            return parameter.detach()
        key = (parameter.data_ptr(), parameter._version, dtype)
        if what not in self._copies or self._copies[what][0] != key:
            self._copies[what] = (key, parameter.detach().to(dtype))
        return self._copies[what][1]


class ExpertShard:
    """Compute of one layer's experts on one F rank; no autograd graph crosses a call.

    `grouped` chooses between torch's grouped GEMM and a loop over experts; None takes the grouped one on CUDA where
    dtype and widths allow it. With `recompute` only the inputs are kept for backward. Tensors given to forward and
    backward are kept, not copied: their buffers must not be reused before backward and the weight gradient have run.
    """

    def __init__(self, module: nn.Module, *, grouped: bool | None = None, recompute: bool = False) -> None:
        check_experts(module)
        flags = flags_of(module)
        assert flags is not None
        self._has_gate = flags.has_gate
        self._module, self._grouped, self._recompute = module, grouped, recompute
        self.kernel = ""
        """What multiplied the rows of the last call: "loop" or "grouped_mm"."""
        self._up = Projection(module, "gate_up_proj" if flags.has_gate else "up_proj", flags)
        self._down = Projection(module, "down_proj", flags)

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of this shard."""
        return self._up.parameters() + self._down.parameters()

    @torch.no_grad()
    def forward(
        self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor, keep: bool = True
    ) -> tuple[Tensor, Once[Activations] | None]:
        """Return the weighted sum over this shard's experts [T, H] in x's dtype, and what backward needs.

        idx_TK holds local expert ids, -1 where a slot belongs to another rank; keep=False (evaluation) saves nothing.
        """
        experts = len(self._down.weight)
        rows = sort_rows(idx_TK, experts, self._use_grouped(x_TH))
        self.kernel = "grouped_mm" if rows.ends is None else "loop"
        z_RZ = self._before_gate(x_TH, rows)
        y_RH = self._down.forward(self._gate(z_RZ), rows)
        y_TH = rows.sum_per_token(y_RH * rows.weights(w_TK)[:, None]).to(x_TH.dtype)
        return y_TH, Once(Activations(rows, x_TH, w_TK, None if self._recompute else z_RZ)) if keep else None

    @torch.no_grad()
    def backward(self, saved: Once[Activations], dy_TH: Tensor) -> tuple[Tensor, Tensor, Once[Cotangents]]:
        """Return dx [T, H] in x's dtype, dw [T, K] in w's dtype (0 at foreign slots) and the weight gradient's input.

        With y = sum_k w (h W2 + b2): g = dy W2^T gives both dw = <g, h> + <dy, b2> and dh = w g, so y itself is not
        kept.
        """
        acts = saved.take()
        rows, dtype = acts.rows, acts.x_TH.dtype
        dy_TH = dy_TH.to(dtype)
        wide = torch.promote_types(torch.promote_types(dtype, acts.w_TK.dtype), torch.float32)
        w_R = rows.weights(acts.w_TK)
        dy_RH = dy_TH.index_select(0, rows.token_R)
        g_RD = self._down.input_gradient(dy_RH, rows)
        z_RZ = self._before_gate(acts.x_TH, rows) if acts.z_RZ is None else acts.z_RZ.detach()
        z_RZ.requires_grad_()
        with torch.enable_grad():
            h_RD = self._gate(z_RZ)
        (dz_RZ,) = torch.autograd.grad(h_RD, z_RZ, (g_RD * w_R[:, None]).to(dtype))
        h_RD = h_RD.detach()
        dw_R = (g_RD.to(wide) * h_RD).sum(1)
        bias_RH = self._down.bias_rows(rows, dtype)
        if bias_RH is not None:
            dw_R += (dy_RH.to(wide) * bias_RH).sum(1)
        dx_TH = rows.sum_per_token(self._up.input_gradient(dz_RZ, rows)).to(dtype)
        dw_TK = rows.to_slots(dw_R.to(acts.w_TK.dtype))
        return dx_TH, dw_TK, Once(Cotangents(rows, acts.x_TH, dz_RZ, h_RD, dy_TH, w_R))

    @torch.no_grad()
    def weight_gradient(self, pending: Once[Cotangents]) -> None:
        """Add this micro-batch's gradients to the parameters' grad; an expert without tokens gets 0, never None."""
        cots = pending.take()
        rows, ones_R = cots.rows, torch.ones_like(cots.w_R)
        self._up.weight_gradient_(cots.x_TH.index_select(0, rows.token_R), cots.dz_RZ, rows)
        self._up.bias_gradient_(cots.dz_RZ, ones_R, rows)
        dy_RH = cots.dy_TH.index_select(0, rows.token_R)
        self._down.weight_gradient_((cots.h_RD * cots.w_R[:, None]).to(dy_RH.dtype), dy_RH, rows)
        self._down.bias_gradient_(dy_RH, cots.w_R, rows)

    def zero_missing_gradients(self) -> None:
        """Give every trainable parameter without a gradient one of zeros, for a step without any row."""
        for parameter in self.parameters():
            if parameter.requires_grad:
                gradient_of(parameter)

    def drop_copies(self) -> None:
        """Forget weights cast to the compute dtype; needed after a write that autograd can't see (`param.data`)."""
        self._up.drop_copies()
        self._down.drop_copies()

    def _before_gate(self, x_TH: Tensor, rows: Rows) -> Tensor:
        return self._up.forward(x_TH.index_select(0, rows.token_R), rows)

    def _gate(self, z_RZ: Tensor) -> Tensor:
        return self._module._apply_gate(z_RZ) if self._has_gate else self._module.act_fn(z_RZ)

    def _use_grouped(self, x_TH: Tensor) -> bool:
        if self._grouped is not None:
            return self._grouped
        widths = {*self._up.weight.shape[1:], *self._down.weight.shape[1:]}
        return has_fast_grouped_mm(x_TH) and all(width * x_TH.element_size() % _ALIGNMENT == 0 for width in widths)


def has_fast_grouped_mm(x: Tensor) -> bool:
    """Whether torch has a grouped kernel for such rows; its substitute copies the ends to the host and loops there."""
    return x.is_cuda and x.dtype in _GROUPED_DTYPES and torch.cuda.get_device_capability(x.device)[0] in _GROUPED_MAJORS


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient, zeros first where it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
