"""Router z-loss inside a Trainer: gradients, loss and logged value are those of a user who adds it to the loss."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
from cases import join
from fits import Batch, Model, Run, State, tokens, worst
from pool import RankPool
from tiny import tiny
from torch import Tensor

COEFFICIENT = 0.3
ROWS = 8


class Watched(Model):
    """Keeps what its hook is told of the last loss."""

    last_loss = 0.0

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.last_loss = outputs["loss"].item()


class WithZLoss(Model):
    """Adds the z-loss of all layers by hand."""

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(batch["input_ids"]).router_logits
        z_loss = sum(layer.exp().sum(-1).log().square().mean() for layer in logits)
        self.log("z", z_loss)
        return super().loss(batch) + COEFFICIENT * z_loss


Kind = TypeVar("Kind", bound=Model)


def module(kind: type[Kind]) -> Kind:
    return kind(tiny(layers=4), [tokens(ROWS, seed=seed, masked=False) for seed in range(2)])


def fit(run: Run, options: dict[str, Any]) -> tuple[State, dict[str, float], float]:
    """Gradients of the second optimizer step, logged values, and on A ranks the loss of the last batch."""
    mine, options = module(Watched), {**options}
    trainer = run.trainer({"router_z_loss": COEFFICIENT, **options.pop("strategy", {})}, **options)
    trainer.fit(mine)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return mine.gradients, logged, mine.last_loss


RUNS = [
    (Run(layout="2A+2F", precision="64-true"), {}),
    (Run(layout="1A+1F", groups=2, precision="64-true"), {"strategy": {"recompute": "full"}}),
]


@pytest.mark.parametrize(("run", "options"), RUNS, ids=["2A+2F", "2 groups"])
def test_it_equals_adding_it_by_hand(pool: RankPool, run: Run, options: dict[str, Any]) -> None:
    reference = module(WithZLoss)
    trainer = Run(layout="ref", precision="64-true").trainer()
    trainer.fit(reference)
    wanted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    ranks = pool.run(fit, run.world, run, options)
    assert worst(join([gradients for gradients, _, _ in ranks]), reference.gradients)[0] < 1e-9
    for _, logged, _ in ranks:
        assert logged["router_z_loss"] == pytest.approx(wanted["z"], rel=1e-9)
        assert logged["train_loss"] == pytest.approx(wanted["train_loss"] - COEFFICIENT * wanted["z"], rel=1e-9)
    for _, _, loss in ranks[: run.sizes[0]]:  # batch hooks of a module run on A group 0
        assert loss == pytest.approx(wanted["train_loss"], rel=1e-6)


def gradients_with(run: Run) -> dict[str, torch.Tensor]:
    return fit(run, {})[0]


def test_without_it_the_gradients_differ(pool: RankPool) -> None:
    run, _ = RUNS[0]
    reference = module(Model)
    Run(layout="ref", precision="64-true").trainer().fit(reference)
    assert worst(join(pool.run(gradients_with, run.world, run)), reference.gradients)[0] > 1e-3
