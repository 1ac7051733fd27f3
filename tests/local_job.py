"""Batches for jobs in one process, which lightning_afd.recipes.local_job runs; see there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_afd.recipes.local_job import (
    Batches,
    Gradients,
    LocalJob,
    Outcome,
    gradients_of,
    join_gradients,
    labels,
    micro_batch_loss,
    plain_step,
    step_of,
    worst_difference,
)
from lightning_afd.segments import UserStep

__all__ = [
    "Batches",
    "Gradients",
    "LocalJob",
    "Outcome",
    "gradients_of",
    "join_gradients",
    "labels",
    "make_batches",
    "micro_batch_loss",
    "plain_step",
    "step_of",
    "user_step",
    "worst_difference",
]


def user_step(model: nn.Module, ids_BS: Tensor, weight: float = 1.0) -> UserStep:
    """A step that returns the loss of a micro-batch."""
    return step_of(lambda: micro_batch_loss(model, ids_BS), weight)


def make_batches(replicas: int, micro_batches: int, *, longer: int = 0, vocab: int = 32) -> list[list[Tensor]]:
    """Seeded ids of which all micro-batches differ in rows (1 to 3) or in length (3 to 6, plus `longer`)."""
    generator = torch.Generator().manual_seed(replicas + 7 * longer)
    return [
        [
            torch.randint(0, vocab, (1 + (a + m) % 3, 3 + longer + (2 * a + m) % 4), generator=generator)
            for m in range(micro_batches)
        ]
        for a in range(replicas)
    ]
