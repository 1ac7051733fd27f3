"""A loss scaler (precision "16-mixed"): the pipeline starts its backward from the scaled loss, all ranks judge as one.

Lightning's own order stays: scale and backward, unscale, hooks, clipping, step, update. Every rank has a scaler of its
own; they stay equal since all of them hear the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_afd.transport.base import Collectives

FoundInf = dict[torch.device, Tensor]


def active_scaler(precision: Any) -> torch.amp.GradScaler | None:
    """The scaler of a precision plugin; None where there is none, or a disabled one."""
    scaler = getattr(precision, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def loss_scale(precision: Any, window: int) -> float:
    """What Lightning multiplies a loss by before its backward, `window` batches being accumulated; 1 without a scaler.

    A backward that starts from less would lose in half precision what the scaler is there to keep.
    """
    scaler = active_scaler(precision)
    return 1.0 if scaler is None else scaler.get_scale() / window


def share_found_inf(precision: Any, collectives: Collectives) -> Callable[[], None]:
    """Where one rank's gradients overflow, let the scalers of all ranks see it; returns what undoes it.

    One exchange of a number per rank and optimizer step, also by ranks without any gradient, and also where the
    optimizer unscales by itself (fused ones), which torch's ShardedGradScaler leaves out.
    """
    scaler = active_scaler(precision)
    if scaler is None:
        return lambda: None
    unscale = scaler._unscale_grads_

    def unscale_and_share(optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> FoundInf:
        own = unscale(optimizer, inv_scale, found_inf, allow_fp16) or {found_inf.device: found_inf}
        everyone = collectives.all_gather([sum(float(value) for value in own.values())])
        verdict = float(any(found for (found,) in everyone))
        return {device: value.fill_(verdict) for device, value in own.items()}

    scaler._unscale_grads_ = unscale_and_share  # type: ignore[method-assign]
    return lambda: scaler.__dict__.pop("_unscale_grads_", None) and None
