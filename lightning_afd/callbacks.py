"""Callbacks for scripts that train with a strategy of this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_afd.draw import draw_timeline
from lightning_afd.namespace import Callback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StepMonitor(Callback):
    """Log tokens per second and the share of exposed communication of each training step, on all ranks alike.

    `tokens_per_s` counts the tokens of all attention ranks over the time of the slowest rank; `exposed` is the mean
    share of their step in which attention ranks waited for messages. Does nothing under other strategies.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        stats = getattr(trainer.strategy, "stats", None)
        if stats is None or stats.seconds <= 0:
            return
        pl_module.log("tokens_per_s", stats.tokens / stats.seconds, prog_bar=True, batch_size=1)
        pl_module.log("exposed", stats.exposed, prog_bar=True, batch_size=1)


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
            order = trainer.strategy.config.order
            draw_timeline(timeline, self._path, f"step {trainer.global_step}, order {order}")
