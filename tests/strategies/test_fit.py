"""Whole runs of Trainer.fit with everything that reads metrics, against one device with the same batches."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from cases import join, weights
from fits import Model, Run, State, tiny_module, worst
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from pool import RankPool

from lightning_afd.batch import batch_rows
from lightning_afd.strategies import driver

ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2, "limit_val_batches": 1.0}


@dataclass
class Result:
    """What one rank has at the end of a run."""

    weights: State
    metrics: dict[str, float]
    rates: list[float]
    counts: dict[str, int]
    best: str
    losses: list[float]
    norms: list[float]
    """Of all gradients, before clipping; empty on one device."""


class Watch(pl.Callback):
    """The learning rate that each batch was trained with, its loss, and the gradient norm."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        """Look at the optimizer and at what the step returned."""
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(outputs["loss"]))
        self.norms += [norm] if (norm := getattr(trainer.strategy, "grad_norm", None)) else []


class WarmUp(Model):
    """AdamW in two parameter groups, whose rate rises with every optimizer step."""

    def configure_optimizers(self) -> Any:
        """Weight decay for matrices only."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Model):
    """SGD that is far too fast, and a rate that depends on the validation loss."""

    def configure_optimizers(self) -> Any:
        """Momentum, and a third of the rate for each epoch that does not get better."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def fit(kind: type[Model], run: Run, folder: Path, unweighted: bool, options: dict[str, Any]) -> Result:
    """One run; `unweighted` gives every micro-batch the weight of its rows instead of its valid labels."""
    module = tiny_module(steps=7, val_steps=3)
    module.__class__ = kind
    watch, stopping = Watch(), EarlyStopping("val_loss", patience=2)
    name = "{epoch}-{step}-{val_loss:.4f}"
    best = ModelCheckpoint(folder / run.layout, name, monitor="val_loss", save_last=True, save_top_k=2)
    trainer = run.trainer(callbacks=[watch, stopping, best], enable_checkpointing=True, **options)
    with patch.object(driver, "loss_weight", batch_rows) if unweighted else nullcontext():
        trainer.fit(module)
    counts = {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "stopped": stopping.stopped_epoch,
        "files": len(list((folder / run.layout).iterdir())),
    }
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return Result(
        weights(module), metrics, watch.rates, counts, Path(best.best_model_path).stem, watch.losses, watch.norms
    )


TWO_REPLICAS, TWO_GROUPS = Run(layout="2A+2F"), Run(layout="1A+1F", groups=2)
TOGETHER = [Run(layout="2ep", micro_batches=1), Run(layout="2flowmoe"), Run(layout="1flowmoe")]


def compare(pool: RankPool, kind: type[Model], folder: Path, run: Run = TWO_REPLICAS, **options: Any) -> Result:
    """Run on one device and on a layout, and compare everything; returns the result of one device."""
    options = {**ACCUMULATED, "max_epochs": 5, **options}
    reference: Result = pool.run(fit, 1, kind, Run(layout="ref"), folder, False, options)[0]
    ranks: list[Result] = pool.run(fit, run.world, kind, run, folder, False, options)
    for rank in ranks:
        assert rank.counts == reference.counts
        assert rank.best == reference.best
        assert rank.rates == pytest.approx(reference.rates, rel=1e-9)
        assert rank.metrics == pytest.approx(reference.metrics, rel=1e-5)
        assert rank.metrics == ranks[0].metrics
        assert rank.norms == ranks[0].norms and max(rank.norms) > 2 * options["gradient_clip_val"]
        assert rank.losses == pytest.approx(reference.losses, rel=1e-5)
    assert worst(join([rank.weights for rank in ranks]), reference.weights)[0] <= 1e-5
    for replica in ranks[1 : run.sizes[0]]:
        dense = [name for name in ranks[0].weights if ".experts." not in name]
        assert dense and all(torch.equal(ranks[0].weights[name], replica.weights[name]) for name in dense)
    return reference


@pytest.mark.parametrize(("run", "epochs"), [(TWO_REPLICAS, 5), (TWO_GROUPS, 2), *((run, 2) for run in TOGETHER)])
def test_warm_up_accumulation_clipping_validation_and_checkpoints(
    pool: RankPool, tmp_path: Path, run: Run, epochs: int
) -> None:
    reference = compare(pool, WarmUp, tmp_path, run, max_epochs=epochs)
    assert reference.counts == {"step": 4 * epochs, "epoch": epochs, "stopped": 0, "files": 3}
    assert reference.rates[-1] == 3e-3 > reference.rates[0]
    assert {"train_loss", "val_loss"} <= reference.metrics.keys()


def test_rate_and_end_that_depend_on_the_validation_loss(pool: RankPool, tmp_path: Path) -> None:
    reference = compare(pool, Plateau, tmp_path, max_epochs=8)
    assert 0 < reference.counts["stopped"] < 7
    assert reference.rates[-1] < reference.rates[0]


def test_unweighted_micro_batches_are_noticed(pool: RankPool, tmp_path: Path) -> None:
    options = {**ACCUMULATED, "max_epochs": 1}
    reference = pool.run(fit, 1, WarmUp, Run(layout="ref"), tmp_path, False, options)[0]
    ranks = pool.run(fit, TWO_REPLICAS.world, WarmUp, TWO_REPLICAS, tmp_path, True, options)
    assert worst(join([rank.weights for rank in ranks]), reference.weights)[0] > 1e-4


def fit_one_layer(run: Run) -> State:
    """Two clipped AdamW steps of a model with one MoE layer."""
    module = tiny_module(steps=2, layers=1)
    module.optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    run.trainer(gradient_clip_val=0.2).fit(module)
    return weights(module)


def test_a_group_may_have_no_layer(pool: RankPool) -> None:
    ranks = pool.run(fit_one_layer, TWO_GROUPS.world, TWO_GROUPS)
    assert [bool(rank) for rank in ranks] == [True, False, True, False]
    assert worst(join(ranks), pool.run(fit_one_layer, 1, Run(layout="ref"))[0])[0] <= 1e-5
