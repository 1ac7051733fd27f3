"""Callbacks for scripts that train with a strategy of this package."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class StepMonitor(pl.Callback):
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
