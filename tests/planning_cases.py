"""Fits whose layout is planned: a module with a dataset, and measurements that are known beforehand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from cases import weights
from fits import QUIET, Batch, Model, State
from lightning.pytorch.plugins.environments import LightningEnvironment
from tiny import tiny, tiny_hf
from torch.utils.data import DataLoader

from lightning_afd import AFDStrategy
from lightning_afd.allocate.calibration import Calibration
from lightning_afd.cost.hardware import Cluster
from lightning_afd.model.sample import shape_of
from lightning_afd.strategies import afd, planned
from lightning_afd.strategies.planning import decide
from lightning_afd.strategies.planning.options import Planning

ROWS, TOKENS = 4, 6
"""Of a batch of each replica."""


@dataclass(frozen=True)
class Known:
    """In the place of a measurement: the described cluster, changed so that the plan is known."""

    change: Callable[[Cluster], Cluster]
    calls: list[float] = field(default_factory=list)

    def __call__(self, module: Any, batch: Any, cluster: Cluster, device: Any, **options: Any) -> Calibration:
        """Collective in name only."""
        self.calls.append(options["budget_seconds"])
        options["progress"]("nothing", 1.0)
        choices = options["choices"]
        return Calibration(model=shape_of(module), cluster=self.change(cluster), batch=batch, choices=choices)


def apart(cluster: Cluster) -> Cluster:
    """A device on which what an action computes does not matter, and on which no rank holds the whole model."""
    device = replace(cluster.device, host_us=5000.0, memory_gb=0.0009, usable_memory=1.0)
    return replace(fast(cluster), device=replace(device, peak_tflops={"float64": 0.1, "float32": 0.1}))


def together(cluster: Cluster) -> Cluster:
    """Links on which separate ranks only wait."""
    slow = replace(cluster.nic, gb_per_s=0.001)
    device = replace(cluster.device, peak_tflops={"float64": 0.1, "float32": 0.1}, memory_gb=1.0)
    return replace(cluster, nic=slow, nvlink=slow, device=device)


def fast(cluster: Cluster) -> Cluster:
    """Links that take no time."""
    quick = replace(cluster.nic, gb_per_s=1e6, latency_us=0.01)
    return replace(cluster, nic=quick, nvlink=quick)


class Planned(Model):
    """A tiny transformers model on rows that are read by index: ROWS of each replica per step."""

    def __init__(self, steps: int = 2, *, dropout: float = 0.0, streams: bool = False, **model: Any) -> None:
        super().__init__(tiny_hf("qwen3_moe", **model), [])
        ids = torch.randint(0, 64, (steps * 4 * ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
        self.rows: list[Batch] = [{"input_ids": row, "labels": row} for row in ids]
        self.steps, self.losses, self.drawn = steps, list[float](), list[float]()
        self.dropout, self.streams = torch.nn.Dropout(dropout), streams

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss, of which dropout makes something else."""
        return self.dropout(super().training_step(batch, batch_idx))

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        """Keep the loss."""
        self.losses.append(float(outputs["loss"]))

    def train_dataloader(self) -> Any:
        """The rows of each step are cut into those of the replicas; a random number is used up."""
        self.drawn.append(float(torch.rand(())))
        own = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        replicas, rank = own["num_replicas"], own["rank"]
        width = ROWS * replicas if replicas > 1 else ROWS * getattr(self, "as_many", 1)
        share = ROWS if replicas > 1 else width
        order = [step * width + rank * ROWS + row for step in range(self.steps) for row in range(share)]
        if self.streams:
            return _Stream([self.rows[index] for index in order])
        return DataLoader(self.rows, batch_size=share, sampler=order)


class _Stream:
    """Rows that are gone once they are read."""

    def __init__(self, rows: list[Batch]) -> None:
        self.batches = [{k: torch.stack([row[k] for row in rows[i : i + ROWS]]) for k in rows[0]} for i in (0, ROWS)]

    def __iter__(self) -> Any:
        while self.batches:
            yield self.batches.pop(0)


@dataclass
class Result:
    """What a rank has in the end."""

    layout: str
    arrangement: Any
    losses: list[float]
    weights: State
    gradients: State
    said: list[str]
    measured: int
    plan: str = ""
    random: float = 0.0


QUICK: dict[str, Any] = {"planning": Planning(trials=0), "recompute": "none", "recompute_experts": False}
"""A plan without trials on real steps, and without recomputation, for which memory is made."""


def fit(
    world: int,
    change: Callable[[Cluster], Cluster] | None,
    options: dict[str, Any],
    folder: Path,
    resume: Path | None = None,
    module: dict[str, Any] | None = None,
) -> Result:
    """Train on this rank; `change` None measures for real."""
    trained, said = Planned(**(module or {})), list[str]()
    known = None if change is None else Known(change)
    trainer = trainer_of(world, options, folder, known)
    torch.manual_seed(5)
    with patch.object(planned, "rank_zero_info", said.append), patch.object(afd, "rank_zero_info", said.append):
        trainer.fit(trained, ckpt_path=resume)
    strategy, plan = trainer.strategy, folder / "plan.json"
    return Result(
        layout=strategy.layout.describe(),
        arrangement=strategy.arrangement,
        losses=trained.losses,
        weights=weights(trained),
        gradients=trained.gradients,
        said=said,
        measured=0 if known is None else len(known.calls),
        plan=plan.read_text() if plan.exists() else "",
        random=float(torch.rand(())),
    )


def trainer_of(
    world: int, options: dict[str, Any], folder: Path, known: Known | None, **trainer_options: Any
) -> pl.Trainer:
    """A quiet Trainer whose strategy measures nothing if it is known."""
    strategy = AFDStrategy(**options)
    if known is not None:
        strategy.calibrate = known  # type: ignore[method-assign]
    return pl.Trainer(
        **{**QUIET, **trainer_options},
        accelerator="cpu",
        devices=world,
        precision="64-true",
        strategy=strategy,
        plugins=[LightningEnvironment()],
        default_root_dir=folder,
    )


def world_size() -> int:
    """Of this job."""
    return int(os.environ["WORLD_SIZE"])


def fit_and_save(world: int, change: Callable[[Cluster], Cluster], folder: Path, path: Path) -> None:
    """A planned fit with a checkpoint at its end, from which one can go on."""
    trainer = trainer_of(world, QUICK, folder, Known(change), max_epochs=1)
    trainer.fit(Planned())
    trainer.save_checkpoint(path)


def evaluate(folder: Path, checkpoint: Path | None) -> tuple[str, int]:
    """Layout and measurements of a validation without a fit."""
    known, module = Known(apart), Planned()
    module.val_batches = [{k: torch.stack([row[k] for row in module.rows[:ROWS]]) for k in module.rows[0]}]
    trainer = trainer_of(world_size(), QUICK, folder, known, limit_val_batches=1.0)
    trainer.validate(module, verbose=False, ckpt_path=checkpoint)
    return trainer.strategy.layout.describe(), len(known.calls)


def fit_twice(world: int, folder: Path) -> tuple[list[str], list[int]]:
    """One module in two Trainers."""
    module, layouts, measured = Planned(), list[str](), list[int]()
    for _ in range(2):
        known = Known(apart)
        trainer = trainer_of(world, QUICK, folder, known)
        trainer.fit(module)
        layouts.append(trainer.strategy.layout.describe())
        measured.append(len(known.calls))
    return layouts, measured


def fit_then_validate(world: int, folder: Path) -> list[tuple[Any, bool]]:
    """One module with one copy of a token per node, then per rank: what is planned, and whether ranks spread copies."""
    module, found = Planned(), list[tuple[Any, bool]]()
    module.val_batches = [{k: torch.stack([row[k] for row in module.rows[:ROWS]]) for k in module.rows[0]}]
    for dedup in ("node", True):
        options = {**QUICK, "attention": 2, "dedup": dedup}
        trainer = trainer_of(world, options, folder, Known(apart), limit_val_batches=1.0)
        trainer.fit(module) if dedup == "node" else trainer.validate(module, verbose=False)
        found.append((dedup, trainer.strategy.layout.spreads))
    return found


def without_a_model(folder: Path) -> tuple[str, bool]:
    """A fit of a model that no configuration describes: its layout, and whether that is explained on rank 0."""
    module, said = Planned(), list[str]()
    module.model = tiny(vocab=64, experts=4)
    trainer = trainer_of(world_size(), QUICK, folder, Known(apart))
    with patch.object(planned, "rank_zero_info", said.append):
        trainer.fit(module)
    return trainer.strategy.layout.describe(), any("transformers model" in line for line in said)


def fit_with_failing_rank_0(folder: Path) -> None:
    """What rank 0 alone does breaks."""

    def breaks(*args: Any) -> None:
        raise ValueError("the solver broke")

    with patch.object(decide, "choose_for_replicas", breaks):
        trainer_of(world_size(), QUICK, folder, Known(apart)).fit(Planned())


def alone(replicas: int) -> Result:
    """The same rows in a plain loop on one device."""
    module = Planned()
    module.as_many = replicas  # type: ignore[assignment]
    trainer = pl.Trainer(**QUIET, accelerator="cpu", devices=1, precision="64-true")
    trainer.fit(module)
    return Result("alone", None, module.losses, weights(module), module.gradients, [], 0)
