"""Loaders that know their position: a fit that resumes amid an epoch goes on with the rows that it would have had."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import weights
from fits import Batch, Run, State, share, tiny_module, tokens
from pool import RankPool
from torch.utils.data import DataLoader, Dataset, IterableDataset

RUN = Run(layout="2A+1F")
EPOCHS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {"use_distributed_sampler": True, "limit_train_batches": 3},
    "stream": {},
    "sized": {},
}
"""Of the Trainer. There are four batches, and in the last two kinds a fifth one on the first attention rank."""


class PositionLoader(DataLoader[Batch]):
    """A DataLoader with a position, as torchdata's StatefulDataLoader is one."""

    done, _start = 0, 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.done, self._start = self._start, 0
        for batch in islice(super().__iter__(), self.done, None):
            self.done += 1
            yield batch
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        """Batches handed out in this epoch; none once it is over."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind them."""
        self._start = state["done"]


class Rows(Dataset[Batch]):
    """32 rows that each are made from their number."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> Batch:
        return {name: value[0] for name, value in tokens(1, seed=row, masked=False).items()}


class Stream(IterableDataset[Batch]):
    """Batches of one replica without a length; replica 0 has one more than the other."""

    def __init__(self, replicas: int, replica: int) -> None:
        self._batches = [share(tokens(8, seed=seed, masked=False), replicas, replica) for seed in range(5 - replica)]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class Sized(Dataset[Batch]):
    """The same with a length."""

    def __init__(self, replicas: int, replica: int) -> None:
        self._batches = list(Stream(replicas, replica))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        return self._batches[number]


class Data(pl.LightningDataModule):
    """A loader with a position: rows that Lightning divides, or batches; it has a state of its own, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.loaded = kind, -1

    def train_dataloader(self) -> Any:
        """Of this replica; Lightning puts its own sampler in where there is a dataset with rows."""
        if self.kind == "rows":
            return PositionLoader(Rows(), batch_size=4)
        own = self.trainer.strategy.distributed_sampler_kwargs
        data = {"stream": Stream, "sized": Sized}[self.kind]
        return PositionLoader(data(own["num_replicas"], own["rank"]), batch_size=None)

    def state_dict(self) -> dict[str, int]:
        """Another one on each rank."""
        return {"rank": self.trainer.global_rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Remember it."""
        self.loaded = state["rank"]


@dataclass
class Saver(pl.Callback):
    """Saves behind some steps, and remembers the rows of every step."""

    folder: Path | None
    steps: tuple[int, ...] = ()
    rows: dict[int, Any] = field(default_factory=dict)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        """Look at a step."""
        step = trainer.global_step
        self.rows[step] = batch["input_ids"].tolist() if isinstance(batch, dict) else None
        if step in self.steps and self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{step}.ckpt")


def fit(kind: str, saver: Saver, start: Path | None = None) -> tuple[State, dict[int, Any], int]:
    """Two epochs, from a checkpoint if there is one; weights, rows and the datamodule's state."""
    module, data = tiny_module(layers=2, seed=0 if start is None else 1), Data(kind)
    trainer = RUN.trainer(max_epochs=EPOCHS, callbacks=[saver], **OPTIONS[kind])
    trainer.fit(module, datamodule=data, ckpt_path=start)
    return weights(module), saver.rows, data.loaded


def through_and_resumed(kind: str, folder: Path, steps: tuple[int, ...]) -> list[tuple[State, dict[int, Any], int]]:
    """An uninterrupted fit, and one from each of its checkpoints."""
    made = [fit(kind, Saver(folder, steps))]
    return made + [fit(kind, Saver(None), folder / f"{step}.ckpt") for step in steps]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_fit_goes_on_with_the_rows_that_are_left(pool: RankPool, tmp_path: Path, kind: str) -> None:
    """Saved behind the last batch of the first epoch and behind the second one of the last."""
    length = OPTIONS[kind].get("limit_train_batches", 4)
    steps = (length, length + 2)
    for number, rank in enumerate(pool.run(through_and_resumed, 3, kind, tmp_path, steps)):
        (through, rows, _), *resumed = rank
        assert len(rows) == length * EPOCHS
        assert (rows[1] is None) == (number == 2)
        for step, (ours, theirs, loaded) in zip(steps, resumed, strict=True):
            assert theirs == {done: value for done, value in rows.items() if done > step}, (number, step)
            assert loaded == number
            assert all(torch.equal(ours[name], value) for name, value in through.items()), (number, step)


def change_of_batch(folder: Path) -> list[list[str]]:
    """What is said in a fit with 4 rows in each batch, and in two that go on with 2 rows, at first in two batches."""
    path, said = folder / "1.ckpt", []
    for rows, accumulated in ((4, 1), (2, 2), (2, 1)):
        module = tiny_module(layers=2)
        module.train_dataloader = lambda rows=rows: PositionLoader(Rows(), batch_size=rows)  # type: ignore[method-assign]
        callbacks = [Saver(folder, () if said else (1,))]
        trainer = RUN.trainer(max_steps=2, accumulate_grad_batches=accumulated, callbacks=callbacks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, ckpt_path=path if said else None)
        said.append([text for text in (str(warning.message) for warning in caught) if "per optimizer step" in text])
    return said


def test_another_global_batch_is_said(pool: RankPool, tmp_path: Path) -> None:
    first, *others = pool.run(change_of_batch, 3, tmp_path)
    assert first[:2] == [[], []] and others == [[[], [], []]] * 2
    ((sentence,),) = first[2:]
    assert "saved with 8 rows (2 replicas x 4 rows x 1 batches)" in sentence
    assert "this fit has 4 rows (2 replicas x 2 rows x 1 batches)" in sentence
