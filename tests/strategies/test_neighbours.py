"""A job whose ranks of both roles take turns: saved, resumed with those of a role together, and asked to predict."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import join, weights
from fits import Model, Run, State, tiny_module, worst
from pool import RankPool

STEPS = 4


class Predicting(Model):
    """Says which rows it got."""

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The ids of the batch, which went through the model."""
        self.model(batch["input_ids"])
        return batch["input_ids"]

    def predict_dataloader(self) -> Any:
        """The first batch's rows, two at a time."""
        return torch.utils.data.DataLoader(Rows(self.batches[0]["input_ids"]), batch_size=2)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of ids."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index]}


def module() -> Predicting:
    plain = tiny_module(steps=STEPS)
    own = Predicting(plain.model, plain.batches, aux=1.0)
    own.optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    return own


def train(run: Run, strategy: dict[str, Any], steps: int, start: Path | None, end: Path | None) -> tuple[State, Any]:
    """Weights after so many steps, and what is predicted then."""
    trainer, own = run.trainer(strategy, max_steps=steps, use_distributed_sampler=True), module()
    trainer.fit(own, ckpt_path=start)
    if end is not None:
        trainer.save_checkpoint(end)
    held = weights(own)
    predicted = trainer.predict(own) if start is None else None
    return held, None if predicted is None else torch.cat(list(predicted))  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "second"), [("groups", "roles"), ("roles", "groups")])
def test_a_job_goes_on_with_other_neighbours(pool: RankPool, tmp_path: Path, first: str, second: str) -> None:
    alone = Run(layout="ref", precision="64-true")
    ((whole, _),) = pool.run(train, 1, alone, {}, STEPS, None, None)
    run, path = Run(precision="64-true"), tmp_path / "half.ckpt"
    halves = pool.run(train, 4, run, {"neighbours": first}, STEPS // 2, None, path)
    assert all(predicted.equal(module().batches[0]["input_ids"]) for _, predicted in halves)
    ends = pool.run(train, 4, run, {"neighbours": second}, STEPS, path, None)
    assert worst(join([held for held, _ in ends]), whole)[0] < 1e-9
