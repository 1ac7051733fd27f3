"""Recompute options inside a Trainer: gradients and loss are those of a plain fit."""

from typing import Any

import pytest
from cases import join
from fits import Run, State, tiny_module, worst
from pool import RankPool

from lightning_afd.model.recompute import CHOICES


def fit(run: Run, choices: list[dict[str, Any]]) -> list[tuple[float, State]]:
    """For each choice of options: the loss of one step and the gradients that this rank holds."""
    results = []
    for options in choices:
        module = tiny_module(shared_expert=True, dense_first=1, aux=0.0)
        trainer = run.trainer(options)
        trainer.fit(module)
        results.append((float(trainer.callback_metrics["train_loss"]), module.gradients))
    return results


def test_recompute_in_a_trainer(pool: RankPool) -> None:
    run = Run(layout="2A+2F", precision="64-true")
    choices: list[dict[str, Any]] = [{"recompute": how, "recompute_experts": how == "full"} for how in CHOICES]
    choices.append({"recompute_experts": True})
    ranks = pool.run(fit, run.world, run, choices)
    ((loss, gradients),) = fit(Run(layout="ref", precision="64-true"), [{}])
    for number in range(len(choices)):
        assert ranks[0][number][0] == pytest.approx(loss, rel=1e-9)
        assert worst(join([rank[number][1] for rank in ranks]), gradients)[0] < 1e-9
