"""An ordinary script whose F rank fails in the way that is asked for: run by tests through Lightning's own launcher."""

import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import lightning as L
from fits import QUIET, Model, tiny_module

from lightning_afd import AFDStrategy
from lightning_afd.strategies.failure import Patience


def fails(how: str) -> Any:
    """What the experts' activation does on the F rank in its third step."""
    if how == "raises":
        raise ValueError("boom")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        threading.Event().wait()


class Failing(L.Callback):
    """Breaks layer 1 of the F rank."""

    def __init__(self, how: str) -> None:
        self._how = how

    def on_train_batch_start(self, trainer: L.Trainer, module: Model, *args: Any) -> None:  # type: ignore[override]
        """In the third batch."""
        if trainer.global_rank == 1 and trainer.global_step == 2:
            module.model.layers[1].mlp.experts.act_fn = lambda *args: fails(self._how)


if __name__ == "__main__":
    AFDStrategy.patience = Patience(cause=2.0, end=8.0)
    strategy = AFDStrategy(micro_batches=2, timeout=timedelta(seconds=15 if sys.argv[1] == "hangs" else 60))
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[Failing(sys.argv[1])], **QUIET)
    trainer.fit(tiny_module(steps=4))
