"""Rates of this process's device: a second or two of matrix products, attention and copies.

What cannot be seen from one device (links) or is a matter of choice (the usable share of its memory) stays as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_afd.cost.hardware import Device
from lightning_afd.model.experts import has_fast_grouped_mm
from lightning_afd.model.grouped import grouped_linear, sort_rows

FEW_ROWS = 16
EXPERTS, HEAD = 4, 64
MOST_CALLS, ENOUGH_SECONDS = 5, 0.2


def measured_device(base: Device, device: torch.device, dtype: torch.dtype, *, size: int = 512) -> Device:
    """`base` with the rates that `device` reaches in `dtype`; `size` rows and columns make the matrices.

    The peak is that of a large GEMM, so that its own efficiency is 1 and the others are shares of it (more than 1 where
    they are faster).
    """
    x, w, few = (_random(device, dtype, *shape) for shape in ((2 * size, size), (size, size), (FEW_ROWS, size)))
    peak = 2 * x.numel() * size / _seconds(lambda: x @ w, device)
    slow = 2 * few.numel() * size / _seconds(lambda: few @ w, device)
    forward, backward = _attention_rates(device, dtype, size)
    efficiency = replace(
        base.efficiency,
        gemm=1.0,
        grouped_gemm=_grouped_rate(device, dtype, size) / peak,
        attention_forward=forward / peak,
        attention_backward=backward / peak,
        hbm=1.0,
        half_rows=max(0.0, FEW_ROWS * (peak / slow - 1)),
    )
    return replace(
        base,
        name=f"{device.type}, measured",
        peak_tflops={**base.peak_tflops, str(dtype).removeprefix("torch."): peak / 1e12},
        hbm_gb_per_s=_copy_rate(device) / 1e9,
        efficiency=efficiency,
        host_us=_launch_seconds(device) * 1e6,
    )


def _grouped_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of the experts' own grouped product."""
    x = _random(device, dtype, 2 * size, size)
    w = _random(device, dtype, EXPERTS, size, size)
    idx = torch.arange(2 * size, device=device)[:, None] % EXPERTS
    rows = sort_rows(idx, EXPERTS, has_fast_grouped_mm(x))
    return 2 * x.numel() * size / _seconds(lambda: grouped_linear(x, w, rows), device)


def _attention_rates(device: torch.device, dtype: torch.dtype, size: int) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward, counted as the cost model counts them."""
    q, k, v = (_random(device, dtype, 1, 4, size, HEAD).requires_grad_() for _ in range(3))
    flops = 2 * 2 * 4 * size * HEAD * (size + 1) / 2

    def forward() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    gradient = torch.ones_like(out)
    one_way = _seconds(forward, device)
    back = _seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), device)
    return flops / one_way, 2.5 * flops / back


def _copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(2**23, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _launch_seconds(device: torch.device) -> float:
    """An action of a hundred kernels that have nothing to do."""
    x = torch.zeros(1, device=device)

    def action() -> None:
        for _ in range(100):
            x.add_(1)

    return _seconds(action, device)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.rand(*shape, device=device).to(dtype)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The fastest of some calls after a first one: what disturbs a measurement makes it slower."""
    call()
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < ENOUGH_SECONDS:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
