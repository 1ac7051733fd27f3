"""validate, test and predict count every row once and in order, as on one device, with metrics of torchmetrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from fits import Batch, Model, Run, tiny_module, tokens
from lightning.pytorch.callbacks import BasePredictionWriter
from pool import RankPool
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_afd.strategies import loaders

SIZES = {"validate": (7, 5), "test": (3,), "predict": (9, 2)}
"""Rows of each loader, in batches of 2: ragged ends, and A ranks without a last batch or without any."""


class Rows(Dataset[Batch]):
    """Numbered rows of tokens."""

    def __init__(self, count: int, seed: int) -> None:
        self.rows = tokens(count, seed=seed, masked=False)

    def __len__(self) -> int:
        return len(self.rows["labels"])

    def __getitem__(self, index: int) -> Batch:
        return {**{name: rows[index] for name, rows in self.rows.items()}, "number": torch.tensor(index)}


class Data(pl.LightningDataModule):
    """Ordinary DataLoaders, and hooks that need a batch."""

    def _loaders(self, name: str) -> list[DataLoader[Batch]]:
        return [DataLoader(Rows(rows, seed), batch_size=2) for seed, rows in enumerate(SIZES[name])]

    def val_dataloader(self) -> Any:
        """Two loaders."""
        return self._loaders("validate")

    def test_dataloader(self) -> Any:
        """One loader."""
        return self._loaders("test")[0]

    def predict_dataloader(self) -> Any:
        """Two loaders."""
        return self._loaders("predict")

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Raises where there is no batch."""
        return {**batch, "double": batch["number"] * 2}


class Judged(Model):
    """Logs metric objects, and values in every hook of an evaluation."""

    def prepare(self) -> "Judged":
        """Metrics as attributes."""
        self.accuracies = torch.nn.ModuleList(MulticlassAccuracy(32, average="micro") for _ in SIZES["validate"])
        self.mean, self.collected = MeanMetric(), MeanMetric()
        self.collection = MetricCollection({"macro": MulticlassAccuracy(32), "micro": MulticlassAccuracy(32, top_k=3)})
        self.hooked: list[int] = []
        return self

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Objects that were called, one name for both loaders, and a number."""
        logits, labels = self._scores(batch)
        self.accuracies[dataloader_idx](logits, labels)
        self.log("acc", self.accuracies[dataloader_idx], on_step=True, on_epoch=True)
        self.log(
            "loss",
            cross_entropy(logits, labels),
            add_dataloader_idx=dataloader_idx == 1,
            batch_size=len(batch["labels"]),
        )
        self.collected.update(batch["number"].float())

    def _scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and labels [T]."""
        return self.model(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()

    def on_validation_epoch_end(self) -> None:
        """A metric that nobody logs as an object."""
        self.log("numbers", self.collected.compute())
        self.collected.reset()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Objects that are only updated, in a collection too."""
        logits, labels = self._scores(batch)
        self.mean.update(cross_entropy(logits, labels), weight=len(batch["labels"]))
        self.log("mean", self.mean)
        self.collection.update(logits, labels)
        self.log_dict(self.collection, on_step=False, on_epoch=True)

    def on_test_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Runs where there is a batch only."""
        self.log("double", batch["double"].float().mean(), on_epoch=True)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """No mere tensor."""
        return {"number": batch["number"], "logits": self.model(batch["input_ids"]).logits[:, -1], "name": "row"}

    def on_predict_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Raises where there is no batch."""
        self.hooked += batch["double"].tolist()


class Writer(BasePredictionWriter):
    """Keeps what it should write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *args: Any) -> None:
        """Rows by number and by index."""
        self.batches.append((prediction["number"].tolist(), list(batch_indices)))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Sequence[Any], batch_indices: Any) -> None:
        """Batches of this rank."""
        self.epochs.append([[batch for batch in loader if batch] for loader in batch_indices])


@dataclass
class Result:
    """What one rank returned and wrote."""

    validated: list[dict[str, float]]
    tested: list[dict[str, float]]
    predicted: list[list[dict[str, Any]]]
    written: Writer
    hooked: list[int] = field(default_factory=list)


def evaluate(run: Run, padded: bool = False) -> Result:
    """All three on one Trainer; `padded` lets Lightning's sampler repeat rows."""
    module, writer = tiny_module(layers=2), Writer()
    module.__class__ = Judged
    module.prepare()  # type: ignore[attr-defined]
    options = {"limit_val_batches": 1.0, "use_distributed_sampler": True, "inference_mode": run.layout == "ref"}
    trainer = run.trainer(callbacks=[writer], **options)
    with patch.object(loaders, "use_own_batches", loaders.use_own_batches if not padded else lambda *args: None):
        validated = trainer.validate(module, Data(), verbose=False)
        tested = trainer.test(module, Data(), verbose=False)
        predicted: Any = trainer.predict(module, Data())
    return Result(
        [dict(entry) for entry in validated], [dict(entry) for entry in tested], predicted, writer, module.hooked
    )


@pytest.fixture(scope="module")
def reference(pool: RankPool) -> Result:
    """One device."""
    return pool.run(evaluate, 1, Run(layout="ref"))[0]


@pytest.fixture(scope="module", params=["2A+2F", "2flowmoe"])
def ranks(pool: RankPool, request: pytest.FixtureRequest) -> list[Result]:
    """Two ranks with attention, and others or not."""
    run = Run(layout=request.param)
    return pool.run(evaluate, run.world, run)


def test_metrics_count_every_row_once_on_every_rank(reference: Result, ranks: list[Result]) -> None:
    names = {name for entry in reference.validated + reference.tested for name in entry}
    assert {"acc_epoch/dataloader_idx_0", "acc_epoch/dataloader_idx_1", "loss", "numbers", "mean", "macro"} <= names
    assert reference.validated[0]["numbers"] == pytest.approx((sum(range(7)) + sum(range(5))) / 12)
    for rank in ranks:
        assert rank.validated == [pytest.approx(entry, rel=1e-5) for entry in reference.validated]
        assert rank.tested == [pytest.approx(entry, rel=1e-5) for entry in reference.tested]


def test_predictions_are_in_order_on_every_rank(reference: Result, ranks: list[Result]) -> None:
    for rank in ranks:
        assert [[batch["number"].tolist() for batch in loader] for loader in rank.predicted] == [
            [batch["number"].tolist() for batch in loader] for loader in reference.predicted
        ]
        for ours, theirs in zip(chain(*rank.predicted), chain(*reference.predicted), strict=True):
            assert torch.allclose(ours["logits"], theirs["logits"], rtol=1e-4, atol=1e-5)
            assert ours["name"] == "row"


def test_writers_and_hooks_get_the_rows_of_their_rank(reference: Result, ranks: list[Result]) -> None:
    for rank in ranks:
        assert all(numbers == indices for numbers, indices in rank.written.batches)
    own = [rank.written.batches for rank in ranks]
    assert not any(own[2:]) and own[1]
    assert sorted(own[0] + own[1]) == sorted(reference.written.batches)
    assert sorted(ranks[0].hooked + ranks[1].hooked) == sorted(reference.hooked)
    parts = [rank.written.epochs for rank in ranks]
    assert not any(parts[2:])
    for loader, batches in enumerate(reference.written.epochs[0]):
        assert sorted(parts[0][0][loader] + parts[1][0][loader]) == sorted(batches)


def test_repeated_rows_are_noticed(pool: RankPool, reference: Result) -> None:
    padded = pool.run(evaluate, 4, Run(), True)[0]
    assert padded.validated[0]["numbers"] != pytest.approx(reference.validated[0]["numbers"], rel=1e-3)
