"""Options of orders inside a Trainer: gradients and loss are those of a plain fit."""

from typing import Any

import pytest
from cases import join
from fits import Run, State, tiny_module, worst
from pool import RankPool

from lightning_afd.strategies.afd import AFDStrategy

CHOICES: list[dict[str, Any]] = [
    {"order": "zero-bubble"},
    {"order": "zero-bubble", "micro_batch_group": 4, "pending_weight_gradients": 1},
    {"order": "zero-bubble", "split_attention": False},
    {"order": "zero-bubble", "recompute": "full"},
    {"order": "af-pipe", "micro_batch_group": 5},
]


def fit(run: Run) -> list[tuple[float, State, bool]]:
    """For each choice: the loss of one step, the gradients of this rank, and whether its backward was divided."""
    results = []
    for options in CHOICES:
        module = tiny_module(shared_expert=True, dense_first=1, layers=4, aux=0.0)
        trainer = run.trainer(options)
        trainer.fit(module)
        assert isinstance(trainer.strategy, AFDStrategy) and trainer.strategy.engine is not None
        weights = any(span.action.phase == "w" for span in trainer.strategy.engine.runtime.spans)
        results.append((float(trainer.callback_metrics["train_loss"]), module.gradients, weights))
    return results


def test_orders_in_a_trainer(pool: RankPool) -> None:
    run = Run(layout="1A+1F", groups=2, micro_batches=7, precision="64-true")
    ranks = pool.run(fit, run.world, run)
    module = tiny_module(shared_expert=True, dense_first=1, layers=4, aux=0.0)
    trainer = Run(layout="ref", precision="64-true").trainer()
    trainer.fit(module)
    for number in range(len(CHOICES)):
        loss, _, _ = ranks[0][number]
        assert loss == pytest.approx(float(trainer.callback_metrics["train_loss"]), rel=1e-9)
        assert worst(join([rank[number][1] for rank in ranks]), module.gradients)[0] < 1e-9
    assert [ranks[0][number][2] for number in range(len(CHOICES))] == [True, True, False, False, False]
    assert [ranks[1][number][2] for number in range(len(CHOICES))] == [True, True, False, False, False]
