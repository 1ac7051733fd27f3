"""self.log in user code that runs once per micro-batch gives what it gives on one device, on every rank."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Batch, Memory, Model, Run, tiny_module, tokens
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache
from pool import RankPool
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_afd.callbacks import StepMonitor


@dataclass
class Result:
    """What logger, progress bar, callbacks and monitors of one rank saw."""

    lines: list[tuple[int, dict[str, float]]]
    bar: dict[str, float]
    callback: dict[str, float]
    outputs: list[dict[str, Any]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


class Outputs(pl.Callback):
    """What callbacks get as the output of a step."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        """Keep it without tensors that need a graph."""
        self.outputs.append({k: v.detach() if isinstance(v, Tensor) else v for k, v in outputs.items()})


class Logging(Model):
    """Logs in every way that Lightning has."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Values before and behind the model's call, of every reduction, some in every second step only."""
        ids, rows = batch["input_ids"], len(batch["input_ids"])
        self.log("ids", ids.double().mean(), on_step=True, on_epoch=True, batch_size=rows)
        self.log("rows", float(rows), reduce_fx="sum", on_epoch=True)
        self.log("largest", ids.max().float(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("smallest", ids.min().float(), reduce_fx="min", on_step=True)
        loss = self.loss(batch)
        self.log("loss", loss, True, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"a": loss * 2, "b": loss + 1}, prog_bar=True, logger=False)
        if batch_idx % 2:
            self.log("sometimes", loss * 3)
        return {"loss": loss, "ids": ids, "squared": loss**2, "names": f"{rows} rows"}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """An epoch mean per loader, and a sum."""
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=len(batch["labels"]))
        self.log_dict({"val_rows": float(len(batch["labels"]))}, reduce_fx="sum", prog_bar=True)

    def val_dataloader(self) -> Any:
        """Two loaders, with unequal batches."""
        return [super().val_dataloader(), self._loader([tokens(5, seed=50, masked=False)])]


def fit(run: Run, masked: bool) -> Result:
    """Two epochs; `masked` makes the labels of one micro-batch invalid in the last batch."""
    module = tiny_module(steps=4, val_steps=2)
    module.batches = [tokens(8, seed=seed, masked=False) for seed in range(4)]
    if masked:
        module.batches[-1]["labels"][:4:2] = -100  # the first micro-batch of replica 0
    module.__class__ = Logging
    memory, outputs = Memory(), Outputs()
    warning_cache.clear()
    trainer = run.trainer(
        logger=memory, callbacks=[outputs], log_every_n_steps=1, limit_val_batches=1.0, max_epochs=1 if masked else 2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    advice = [str(warning.message) for warning in caught if "sync_dist" in str(warning.message)]
    bar = {key: float(value) for key, value in trainer.progress_bar_metrics.items()}
    callback = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return Result(memory.lines, bar, callback, outputs.outputs, advice)


@pytest.fixture(scope="module")
def results(pool: RankPool) -> tuple[Result, list[Result]]:
    """One device, and the four ranks of 2A+2F."""
    return pool.run(fit, 1, Run(layout="ref"), False)[0], pool.run(fit, 4, Run(), False)


def test_every_logged_value_on_every_rank(results: tuple[Result, list[Result]]) -> None:
    reference, ranks = results
    assert len(reference.lines) > 8
    for rank in ranks:
        assert [step for step, _ in rank.lines] == [step for step, _ in reference.lines]
        for (_, ours), (_, theirs) in zip(rank.lines, reference.lines, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert rank.callback == pytest.approx(reference.callback, rel=1e-5)
        assert rank.bar == pytest.approx(reference.bar, rel=1e-5)


def test_the_reference_logs_what_we_mean(results: tuple[Result, list[Result]]) -> None:
    reference, _ = results
    epoch = next(line for _, line in reference.lines if "rows_epoch" in line)
    assert epoch["rows_epoch"] == 32.0
    assert {"loss_step", "loss_epoch", "ids_epoch", "largest", "smallest", "sometimes"} <= reference.callback.keys()
    assert {"a", "b", "loss_step"} <= reference.bar.keys()
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= reference.callback.keys()


def test_all_ranks_log_the_same_bits(results: tuple[Result, list[Result]]) -> None:
    _, ranks = results
    assert all(
        (rank.lines, rank.callback, rank.bar) == (ranks[0].lines, ranks[0].callback, ranks[0].bar) for rank in ranks
    )


def test_nobody_is_told_to_reduce_what_is_global_already(results: tuple[Result, list[Result]]) -> None:
    reference, ranks = results
    assert [rank.advice for rank in (reference, *ranks)] == [[]] * 5


def test_outputs_of_a_step_are_those_of_the_batch(results: tuple[Result, list[Result]]) -> None:
    reference, ranks = results
    for number, theirs in enumerate(reference.outputs):
        for replica in (0, 1):
            ours = ranks[replica].outputs[number]
            assert ours.keys() == theirs.keys()
            assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-5)
            assert torch.equal(ours["ids"], theirs["ids"][replica::2])
            assert ours["squared"] > 0 and ours["names"] == ["2 rows", "2 rows"]
        assert all(float(rank.outputs[number]["loss"]) == float(ranks[0].outputs[number]["loss"]) for rank in ranks)


def test_a_masked_micro_batch_is_left_out(pool: RankPool) -> None:
    reference = pool.run(fit, 1, Run(layout="ref"), True)[0]
    for rank in pool.run(fit, 4, Run(), True):
        step, whole = rank.callback, reference.callback
        assert step["loss_step"] == pytest.approx(whole["loss_step"], rel=1e-5)  # a mean over valid labels already
        assert step["rows_epoch"] == 8 * 4 - 2 and whole["rows_epoch"] == 8 * 4
        assert all(value == value for value in step.values())


class EndOfEpoch(Model):
    """Collects in steps and logs when an epoch ends, with and without torchmetrics."""

    def prepare(self) -> "EndOfEpoch":
        """Nothing collected yet."""
        self.losses: list[Tensor] = []
        self.mean = MeanMetric()
        return self

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Collect the loss."""
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        """What every tutorial does; there is nothing to stack on a rank without steps of its own."""
        self.log("train_mean", torch.stack(self.losses).mean())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Collect the number of tokens of an evaluated batch."""
        self.mean.update(self.loss(batch), weight=len(batch["labels"]))

    def on_validation_epoch_end(self) -> None:
        """A mean over everything that all ranks have evaluated."""
        self.log("val_mean", self.mean.compute(), prog_bar=True)
        self.mean.reset()


def collected(run: Run) -> tuple[dict[str, float], int]:
    """Train until the metric of the hook stops the run."""
    module = tiny_module(val_steps=2)
    module.batches = [tokens(8, masked=False)] * 2
    module.__class__ = EndOfEpoch
    module.prepare()  # type: ignore[attr-defined]
    stopping = EarlyStopping("val_mean", patience=1, min_delta=10.0)
    trainer = run.trainer(callbacks=[stopping], limit_val_batches=1.0, max_epochs=5)
    trainer.fit(module)
    run.trainer(limit_val_batches=1.0).validate(module, verbose=False)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}, stopping.stopped_epoch


def test_values_logged_at_the_end_of_an_epoch(pool: RankPool) -> None:
    metrics, stopped = pool.run(collected, 1, Run(layout="ref"))[0]
    ranks = pool.run(collected, 4, Run())
    assert metrics.keys() == {"train_mean", "val_mean"} and stopped == 1
    for rank in ranks:
        assert rank[0] == pytest.approx(metrics, rel=1e-5) and rank[1] == stopped
        assert rank == ranks[0]


def monitored(run: Run) -> tuple[dict[str, float], list[tuple[int, dict[str, float]]]]:
    """A run with a StepMonitor."""
    memory = Memory()
    trainer = run.trainer(callbacks=[StepMonitor()], logger=memory, log_every_n_steps=1)
    trainer.fit(tiny_module(steps=3))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}, memory.lines


def test_the_step_monitor_tells_all_ranks_the_same(pool: RankPool) -> None:
    ranks = pool.run(monitored, 4, Run())
    metrics, lines = ranks[0]
    assert metrics["tokens_per_s"] > 0 and 0 <= metrics["exposed"] <= 1
    assert sum("tokens_per_s" in line for _, line in lines) == 3
    assert all(rank == ranks[0] for rank in ranks)
