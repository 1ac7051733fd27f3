"""Router z-loss: keeps router logits small, so that their softmax does not round (ST-MoE, arXiv 2202.08906).

Shapes: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_afd.errors import PlanError
from lightning_afd.model.coroutine import Segment


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean over tokens of log(sum(exp(logits)))^2 (ST-MoE, equation 5), in float32 at least."""
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return wide_TE.logsumexp(-1).square().mean()


def add_z_gradient(leaf_TE: Tensor, weight: float) -> Tensor:
    """Add the gradient of weight * z-loss to that of a leaf; returns the z-loss, without graph."""
    with torch.enable_grad():
        loss = z_loss(leaf_TE)
    loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]
    return loss.detach()


def refuse_other_than_logits(segment: Segment) -> None:
    """Raises PlanError where the router of a layer returned no logits: none at all, or probabilities instead."""
    instead = "set router_z_loss=0, or add such a loss in training_step"
    if not segment.logits:
        raise PlanError(
            f"router_z_loss: MoE layer {segment.layer} has no router that returns (logits [tokens, experts], ..., "
            f"chosen experts) and trains: {instead}"
        )
    rows_TE = segment.logits[0][0].detach().float()
    if bool((rows_TE >= 0).all() and ((rows_TE.sum(-1) - 1).abs() < 1e-2).all()):
        raise PlanError(
            f"router_z_loss: the router of MoE layer {segment.layer} returns probabilities instead of logits: {instead}"
        )
