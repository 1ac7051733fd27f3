"""A gradient that is not finite on one rank: named on every rank, or nobody makes the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LM, batch, fit_apart, weights
from pool import RankPool, RemoteError

from lightning_afd.strategies.gradient_norm import GradientNorm

CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 1.0},
    "value": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
}


class PoisonedLM(LM):
    """Puts an infinite value into the first expert gradient of rank 2 in the second step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_rank == 2 and self.trainer.global_step == 1:
            experts = [p for name, p in self.named_parameters() if ".experts." in name and p.grad is not None]
            experts[0].grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]


def poisoned(on_nonfinite: str, batches: int, clipping: str) -> dict[str, torch.Tensor]:
    module = PoisonedLM([batch(4, 8, seed) for seed in range(batches)], layers=2)
    fit_apart(module, 2, 2, R=2, on_nonfinite=on_nonfinite, **CLIPPING[clipping])
    return weights(module)


def unchecked(clipping: str) -> dict[str, torch.Tensor]:
    """As if nobody looked at the norm where gradients are not clipped by it."""
    check, GradientNorm._check_once = GradientNorm._check_once, lambda self: None  # type: ignore[method-assign]
    try:
        return poisoned("error", 2, clipping)
    finally:
        GradientNorm._check_once = check  # type: ignore[method-assign]


@pytest.mark.parametrize("clipping", CLIPPING)
def test_every_rank_names_rank_and_parameter(pool: RankPool, clipping: str) -> None:
    for error in pool.try_run(poisoned, 4, "error", 2, clipping):
        assert isinstance(error, RemoteError) and error.type_name == "FloatingPointError"
        assert "experts.gate_up_proj on rank 2 (F0) is not finite in step 1" in error.message


@pytest.mark.parametrize("clipping", ["none", "value"])
def test_only_the_check_finds_it_without_clipping_by_norm(pool: RankPool, clipping: str) -> None:
    """Clipping by value would even hide it."""
    parts = pool.run(unchecked, 4, clipping)
    finite = all(value.isfinite().all() for part in parts for value in part.values())
    assert finite == (clipping == "value")


@pytest.mark.parametrize("clipping", CLIPPING)
def test_skip_makes_the_step_on_no_rank(pool: RankPool, clipping: str) -> None:
    two, one = pool.run(poisoned, 4, "skip", 2, clipping), pool.run(poisoned, 4, "skip", 1, clipping)
    for after_two, after_one in zip(two, one, strict=True):
        assert all(torch.equal(after_two[name], after_one[name]) for name in after_one)


def test_training_goes_on_behind_a_skipped_step(pool: RankPool) -> None:
    three, one = pool.run(poisoned, 4, "skip", 3, "norm"), pool.run(poisoned, 4, "skip", 1, "norm")
    assert all(value.isfinite().all() for part in three for value in part.values())
    assert any(not torch.equal(three[0][name], one[0][name]) for name in one[0])
