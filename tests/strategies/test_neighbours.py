"""A job whose ranks of both roles take turns: saved, resumed with those of a role together (and one copy of a token for
all FFN ranks), and asked to predict."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
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


class Saver(pl.Callback):
    """Saves in the middle of the epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """After half of the steps."""
        if trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(self.path)


def train(run: Run, strategy: dict[str, Any], path: Path) -> tuple[State, torch.Tensor]:
    """Weights after all steps, and what is predicted then."""
    trainer, own = run.trainer(strategy, callbacks=[Saver(path)], use_distributed_sampler=True), module()
    trainer.fit(own)
    held = weights(own)
    return held, torch.cat(list(trainer.predict(own)))  # type: ignore[arg-type]


def go_on(run: Run, strategy: dict[str, Any], path: Path) -> State:
    """Weights after the second half of the steps."""
    trainer, own = run.trainer(strategy), module()
    trainer.fit(own, ckpt_path=path)
    return weights(own)


def test_a_job_is_the_same_with_any_neighbours(pool: RankPool, tmp_path: Path) -> None:
    ((whole, rows),) = pool.run(train, 1, Run(layout="ref", precision="64-true"), {}, tmp_path / "alone.ckpt")
    run, path = Run(precision="64-true"), tmp_path / "half.ckpt"
    ranks = pool.run(train, 4, run, {"neighbours": "groups"}, path)
    assert all(predicted.equal(rows) for _, predicted in ranks)
    assert worst(join([held for held, _ in ranks]), whole)[0] < 1e-9
    for strategy in ({"neighbours": "groups"}, {"neighbours": "roles"}, {"dedup": "node"}):
        assert worst(join(pool.run(go_on, 4, run, strategy, path)), whole)[0] < 1e-9
