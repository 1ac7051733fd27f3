"""Callbacks for scripts that train with a strategy of this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_afd.draw import draw_timeline
from lightning_afd.expert_load import load_figures
from lightning_afd.namespace import Callback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StepMonitor(Callback):
    """Log tokens per second and the share of exposed communication of each training step, on all ranks alike.

    `tokens_per_s` counts the tokens of all attention ranks over the time of the slowest rank; `exposed` is the mean
    share of their step in which attention ranks waited for messages. Does nothing under other strategies.

    In steps that are recorded (`AFDStrategy(trace=)`) also `wait_for_A`, `wait_for_net`, `wait_for_F` and `bubble`:
    mean shares of the step over all ranks, attention and FFN. These go to the loggers at any log_every_n_steps.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        stats = getattr(trainer.strategy, "stats", None)
        if stats is None or stats.seconds <= 0:
            return
        pl_module.log("tokens_per_s", stats.tokens / stats.seconds, prog_bar=True, batch_size=1)
        pl_module.log("exposed", stats.exposed, prog_bar=True, batch_size=1)
        recorded = trainer.strategy.recorded
        if recorded is not None:
            for name, share in recorded.shares.items():
                pl_module.log(name, share, prog_bar=True, logger=False, batch_size=1)
            for logger in trainer.loggers:
                logger.log_metrics(dict(recorded.shares), step=recorded.global_step)


class ExpertLoad(Callback):
    """Log how evenly tokens are spread over the experts of each MoE layer, every `every_n_steps` optimizer steps.

    `moe/layer3/max_over_mean` is the load of the busiest expert over the mean one, `moe/layer3/dead_experts` the number
    of experts without a token, in that step: all micro-batches of all attention ranks. They go to the loggers, at any
    log_every_n_steps, and into trainer.callback_metrics of all ranks; loggers whose experiment has `add_histogram`
    (TensorBoard) get all loads, too. Does nothing under other strategies. One exchange per logged step.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: at least 1 is needed")
        self._every = every_n_steps
        self._step = 0
        self.loads: tuple[Tensor, ...] = ()
        """Tokens per expert of each MoE layer in the step that was logged last, the same on all ranks."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        if hasattr(trainer.strategy, "balance"):
            trainer.strategy.balance.count()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        step, before = trainer.global_step, self._step
        self._step = step
        if step == before or step % self._every or not hasattr(trainer.strategy, "balance"):
            return
        self.loads = trainer.strategy.balance.loads()
        figures = {
            f"moe/layer{layer}/{name}": value
            for layer, load_E in enumerate(self.loads)
            for name, value in load_figures(load_E).items()
        }
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in figures.items()})
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)
            self._draw(logger, step)

    def _draw(self, logger: Any, step: int) -> None:
        experiment = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_histogram"):
            for layer, load_E in enumerate(self.loads):
                experiment.add_histogram(f"moe/layer{layer}/tokens", load_E, step)


class TimelinePicture(Callback):
    """Draw what every rank did during one training step: `path` (png, svg or pdf) is written after step `step`.

    Does nothing under other strategies.
    """

    def __init__(self, path: str, step: int = 50) -> None:
        self._path = Path(path)
        self._step = step
        self._drawn = False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._drawn or trainer.global_step < self._step or not hasattr(trainer.strategy, "gather_timeline"):
            return
        self._drawn = True
        timeline = trainer.strategy.gather_timeline()
        if timeline is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draw_timeline(timeline, self._path, f"step {trainer.global_step}, order {trainer.strategy.order}")
