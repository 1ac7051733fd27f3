"""An ordinary script of which one rank fails as asked for: run by tests through Lightning's own launcher.

Arguments: ranks, and how one of them fails. "raises", "exits" and "hangs" happen in the experts of the last F rank;
"early-raises" and "early-exits" on rank 0 before the ranks meet, while the others already wait for it.
"""

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import lightning as L
from fits import QUIET, Model, tiny_module

from lightning_afd import AFDStrategy
from lightning_afd.strategies.failure import Patience


def fails(how: str) -> Any:
    """End this rank."""
    if how == "raises":
        raise ValueError("boom")
    if how == "exits":
        os._exit(9)
    if how == "hangs":
        threading.Event().wait()


class FailingExperts(L.Callback):
    """Breaks layer 1 of one F rank in its third step."""

    def __init__(self, rank: int, how: str) -> None:
        self._rank, self._how = rank, how

    def on_train_batch_start(self, trainer: L.Trainer, module: Model, *args: Any) -> None:  # type: ignore[override]
        """In the third batch."""
        if trainer.global_rank == self._rank and trainer.global_step == 2:
            module.model.layers[1].mlp.experts.act_fn = lambda *args: fails(self._how)


def main(ranks: int, how: str) -> None:
    """Train, or not."""
    AFDStrategy.patience = Patience(cause=2.0, end=8.0)
    strategy = AFDStrategy(plan="none", micro_batches=2, timeout=timedelta(seconds=15 if how == "hangs" else 60))
    early, _, later = how.rpartition("-")
    callbacks = [] if early else [FailingExperts(ranks - 1, later)]
    trainer = L.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, callbacks=callbacks, **QUIET)
    module = tiny_module(steps=4)
    if early and trainer.local_rank == 0:
        module.configure_callbacks = lambda: fails(later)  # called while the ranks are not connected
    trainer.fit(module)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
