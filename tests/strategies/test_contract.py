"""Options of the Trainer do the same, at the same steps, as on one device; every rank makes the same decisions."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import join, weights
from fits import Batch, Model, Run, State, Steps, tiny_module, worst
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

RUN, REF = Run(layout="2A+1F"), Run(layout="ref")
ALL = {"limit_val_batches": 1.0}


class Diary(pl.Callback):
    """What the Trainer did, and after how many optimizer steps."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _note(self, what: str, trainer: pl.Trainer) -> None:
        self.lines.append(f"{what} {trainer.current_epoch} {trainer.global_step}")

    def on_sanity_check_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Before the first step."""
        self._note("sanity", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """An epoch."""
        self._note("epoch", trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """A batch."""
        self._note("batch", trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """A batch of validation."""
        self._note("validation batch", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """A whole validation."""
        self._note("validation", trainer)


class Clock(Timer):
    """What `max_time` adds; here a second is a batch, and passes on rank 0 only."""

    batches = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """One more."""
        self.batches += trainer.is_global_zero
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage: Any = None) -> float:
        """Batches."""
        return self.batches


class Everything(Model):
    """Logs numbers and metric objects in its step and in hooks, and skips what is left of an epoch once."""

    skip_at = -1

    def prepare(self) -> "Everything":
        """Metrics as attributes."""
        self.mean, self.loaded = MeanMetric(), 0
        self.seen: list[int] = []
        return self

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """A metric that is called; its value of a step is that of the batch."""
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        """Needs a batch, which only A ranks have."""
        self.seen.append(int(batch["input_ids"].shape[1]))
        return -1 if self.global_step == self.skip_at else None

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Logs where only A ranks are."""
        self.log("ids", batch["input_ids"].float().mean(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        """Reads what the Trainer has computed by then; nothing under `barebones`."""
        self.log("half", self.trainer.callback_metrics.get("mean_epoch", 0.0) / 2)

    def train_dataloader(self) -> Any:
        """Batches from the first one in every epoch; counts how often it is asked."""
        self.loaded += 1
        batches: Any = super().train_dataloader().batches
        return DataLoader(batches, batch_size=None)

    def configure_optimizers(self) -> Any:
        """A rate that falls where the validation loss does not."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        plateau = {"scheduler": scheduler, "monitor": "val_loss", "strict": False, "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


@dataclass
class Result:
    """What one rank did."""

    diary: list[str]
    metrics: dict[str, float]
    weights: State
    files: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    loaded: int = 0


def _savers(folder: Path) -> list[ModelCheckpoint]:
    return [
        ModelCheckpoint(folder / "every", "{step}", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(folder / "timed", "{step}", train_time_interval=timedelta(0), monitor="train_loss"),
        ModelCheckpoint(
            folder / "epochs", "{epoch}", monitor="half", mode="max", save_on_train_epoch_end=True, every_n_epochs=1
        ),
        ModelCheckpoint(folder / "best", "{epoch}-{step}", monitor="val_loss", save_top_k=1, save_last=True),
    ]


def _options(folder: Path) -> list[dict[str, Any]]:
    """Each is one fit; together they are what users set most."""
    logger: Any = CSVLogger(str(folder), name="csv", version="", flush_logs_every_n_steps=1)
    watched = {
        "logger": logger,
        "log_every_n_steps": 1,
        "callbacks": [
            LearningRateMonitor("step"),
            EarlyStopping("half", patience=9, check_on_train_epoch_end=True),
            *_savers(folder),
        ],
        "enable_checkpointing": True,
        "enable_progress_bar": True,
    }
    return [
        {
            **watched,
            "max_epochs": 3,
            "num_sanity_val_steps": 1,
            "val_check_interval": 0.5,
            "limit_train_batches": 4,
            "limit_val_batches": 0.5,
            "gradient_clip_val": 1e-3,
            "gradient_clip_algorithm": "value",
            "profiler": "simple",
            "detect_anomaly": True,
            "deterministic": True,
        },
        {"max_epochs": -1, "max_steps": 7, "val_check_interval": 3, "check_val_every_n_epoch": None, **ALL},
        {"max_epochs": 2, "overfit_batches": 2, "reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 1},
        {"max_epochs": 5, "callbacks": [Clock({"seconds": 3}, interval="step")]},
        {"fast_dev_run": 2},
        {"barebones": True, "max_epochs": 1},
    ]


_BAREBONES = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")


def trainer_of(run: Run, options: dict[str, Any]) -> pl.Trainer:
    """A Trainer with these options; barebones has its own idea of some."""
    if "barebones" in options:
        options = {**options, **dict.fromkeys(_BAREBONES)}
    return run.trainer(**options)


def everything(steps: int, **changes: Any) -> Everything:
    """A module with `steps` training batches without masked labels, and two validation batches."""
    module = tiny_module(steps=steps, val_steps=2, layers=2)
    for batch in module.batches:
        batch["labels"] = batch["input_ids"].clone()
    module.__class__ = Everything
    assert isinstance(module, Everything)
    for name, value in changes.items():
        setattr(module, name, value)
    return module.prepare()


def fits(run: Run, folder: Path) -> list[Result]:
    """One fit per entry of `_options`."""
    results = []
    for options in _options(folder / run.layout):
        module, diary = everything(5, skip_at=9 if "profiler" in options else -1), Diary()
        trainer = trainer_of(run, {**options, "callbacks": [diary, *options.get("callbacks", [])]})
        trainer.fit(module)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.append(Result(diary.lines, metrics, weights(module), loaded=module.loaded))
    top = folder / run.layout
    results[0].files = sorted(str(path.relative_to(top)) for path in top.glob("*/*") if "csv" not in path.parts)
    results[0].log = (top / "csv" / "metrics.csv").read_text().splitlines()
    return results


@pytest.fixture(scope="module")
def results(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Result], list[list[Result]]]:
    """All fits on one device, and on the three ranks of 2A+1F."""
    folder = tmp_path_factory.mktemp("contract")
    return pool.run(fits, 1, REF, folder, timeout=120)[0], pool.run(fits, 3, RUN, folder, timeout=120)


@pytest.mark.parametrize("number", range(len(_options(Path()))))
def test_the_same_happens_at_the_same_steps(results: tuple[list[Result], list[list[Result]]], number: int) -> None:
    reference, ranks = results[0][number], [rank[number] for rank in results[1]]
    assert len(reference.diary) >= 2
    for rank in ranks:
        assert rank.diary == reference.diary
        assert rank.metrics == pytest.approx(reference.metrics, rel=1e-5)
        assert rank.loaded == reference.loaded
    assert worst(join([rank.weights for rank in ranks]), reference.weights)[0] <= 1e-5


def test_the_reference_did_what_the_options_say(results: tuple[list[Result], list[list[Result]]]) -> None:
    halves, interval, overfit, timed, dev, bare = [result.diary for result in results[0]]
    assert halves[:5] == ["validation batch 0 0", "validation 0 0", "sanity 0 0", "batch 0 1", "batch 0 2"]
    assert _lines(halves, "validation ") == ["0 0", "0 2", "0 4", "1 6", "1 8"]
    assert _lines(halves, "epoch ") == ["0 4", "1 8", "2 9"]  # skipped after the first batch of the third one
    assert _lines(interval, "validation ") == ["0 3", "1 6"] and len(_lines(interval, "batch ")) == 7
    assert len(_lines(overfit, "batch ")) == 4 and results[0][2].loaded == 2
    assert len(_lines(timed, "batch ")) == 3
    assert len(_lines(dev, "batch ")) == 2 and len(_lines(bare, "batch ")) == 5


def _lines(diary: list[str], kind: str) -> list[str]:
    """Epoch and step of one kind of event."""
    lines = [line.removeprefix(kind) for line in diary if line.startswith(kind)]
    return [line for line in lines if not line.startswith("batch")]


def test_one_log_with_the_values_of_one_device(results: tuple[list[Result], list[list[Result]]]) -> None:
    reference, rank = results[0][0].log, results[1][0][0].log
    assert {"mean_step", "mean_epoch", "ids_step", "half", "lr-SGD"} <= set(reference[0].split(","))
    assert len(rank) == len(reference) and set(rank[0].split(",")) == set(reference[0].split(","))
    for ours, theirs in zip(_rows(rank), _rows(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def _rows(lines: list[str]) -> list[dict[str, float]]:
    names = lines[0].split(",")
    return [
        {name: float(value) for name, value in zip(names, line.split(","), strict=True) if value} for line in lines[1:]
    ]


def test_callbacks_save_after_the_same_steps(results: tuple[list[Result], list[list[Result]]]) -> None:
    reference, ranks = results[0][0].files, [rank[0].files for rank in results[1]]
    assert {"every/step=2.ckpt", "best/last.ckpt"} <= set(reference)
    assert all(files == reference for files in ranks)


class Pair(Model):
    """Trains on two loaders at once."""

    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        """The rows of both, or of the one that is left."""
        parts = [part for part in batch.values() if part is not None]
        return super().training_step({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, batch_idx)

    def train_dataloader(self) -> Any:
        """Of unequal length."""
        batches = super().train_dataloader().batches
        return CombinedLoader({"a": Steps(batches), "b": Steps(batches[:2])}, self.mode)

    mode = "min_size"


def combined(run: Run) -> list[tuple[int, float, State]]:
    """One epoch in each mode that trains on several loaders at once."""
    made = []
    for mode in ("min_size", "max_size_cycle", "max_size"):
        module = everything(3)
        module.__class__ = Pair
        module.mode = mode  # type: ignore[assignment]
        trainer = run.trainer()
        trainer.fit(module)
        made.append((trainer.global_step, float(trainer.callback_metrics["train_loss"]), weights(module)))
    return made


def test_several_loaders_at_once(pool: RankPool) -> None:
    reference, ranks = pool.run(combined, 1, Run(layout="ref"))[0], pool.run(combined, 3, RUN)
    assert [steps for steps, _, _ in reference] == [2, 3, 3]
    for mode, (steps, loss, whole) in enumerate(reference):
        assert [rank[mode][0] for rank in ranks] == [steps] * 3
        assert [rank[mode][1] for rank in ranks] == pytest.approx([loss] * 3, rel=1e-5)
        assert worst(join([rank[mode][2] for rank in ranks]), whole)[0] <= 1e-5
