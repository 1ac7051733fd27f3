"""A gradient that is not finite on one rank: named on every rank, or nobody makes the step."""

from __future__ import annotations

import torch
from cases import LM, batch, fit_apart, weights
from pool import RankPool, RemoteError


class PoisonedLM(LM):
    """Puts NaN into the first expert gradient of rank 2 in the second step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_rank == 2 and self.trainer.global_step == 1:
            experts = [p for name, p in self.named_parameters() if ".experts." in name and p.grad is not None]
            experts[0].grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]


def poisoned(on_nonfinite: str, batches: int) -> dict[str, torch.Tensor]:
    module = PoisonedLM([batch(4, 8, seed) for seed in range(batches)])
    fit_apart(module, 2, 2, R=2, gradient_clip_val=1.0, on_nonfinite=on_nonfinite)
    return weights(module)


def test_every_rank_names_rank_and_parameter(pool: RankPool) -> None:
    for error in pool.try_run(poisoned, 4, "error", 2):
        assert isinstance(error, RemoteError) and error.type_name == "FloatingPointError"
        assert "experts.gate_up_proj on rank 2 (F0) is not finite in step 1" in error.message


def test_skip_makes_the_step_on_no_rank(pool: RankPool) -> None:
    two, one = pool.run(poisoned, 4, "skip", 2), pool.run(poisoned, 4, "skip", 1)
    for after_two, after_one in zip(two, one, strict=True):
        assert all(torch.equal(after_two[name], after_one[name]) for name in after_one)


def test_training_goes_on_behind_a_skipped_step(pool: RankPool) -> None:
    three, one = pool.run(poisoned, 4, "skip", 3), pool.run(poisoned, 4, "skip", 1)
    assert all(value.isfinite().all() for part in three for value in part.values())
    assert any(not torch.equal(three[0][name], one[0][name]) for name in one[0])
