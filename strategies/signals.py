"""Signals that any one rank may get, acted upon by all ranks at the same place: at the end of a step.

Lightning's own handlers broadcast or save inside of the handler, which hangs where only one rank got the signal. Here a
handler only takes a note; the ranks exchange their notes with the figures of each step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_afd.namespace import namespace_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

NOTHING, REQUEUE, STOP = 0.0, 1.0, 2.0
"""What a rank asks for; the largest wish of all ranks counts."""


class AgreedSignals:
    """SIGTERM, and SLURM's requeue signal, of one fit."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._connector = trainer._signal_connector
        self._requeue = self._connector._slurm_sigusr_handler_fn
        self._wish = self._agreed = NOTHING
        # Bound methods: Lightning registers them after the strategy's set-up.
        self._connector._sigterm_notifier_fn = self._note_stop  # type: ignore[method-assign]
        self._connector._slurm_sigusr_handler_fn = self._note_requeue  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._between_steps  # type: ignore[method-assign]

    def wish(self) -> float:
        """What this rank asks for; sent with the figures of a step."""
        return self._wish

    def agree(self, wish: float, *, step_ends: bool) -> None:
        """The largest wish of all ranks; `step_ends` where the optimizer steps after this batch."""
        self._agreed = max(self._agreed, wish)
        if self._agreed == STOP and step_ends:
            self._connector.received_sigterm = True  # Lightning's loop raises SIGTERMException behind the step

    @property
    def stops(self) -> bool:
        """Whether all ranks leave together, so that they can still write a checkpoint together."""
        return self._connector.received_sigterm

    def remove(self) -> None:
        """Give the Trainer its own methods back."""
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            self._connector.__dict__.pop(name, None)
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def _note_stop(self, signum: int, frame: FrameType | None) -> None:
        self._wish = STOP

    def _note_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._wish = max(self._wish, REQUEUE)

    def _between_steps(self) -> None:
        """In the place of Lightning's broadcast, at the start of every batch: all ranks save together."""
        if self._agreed == REQUEUE:
            self._wish = self._agreed = NOTHING
            self._requeue(signal.SIGUSR1, None)


def save_last(trainer: pl.Trainer) -> None:
    """Collective: write what `ckpt_path="last"` finds, unless a callback of the user has saved on the exception."""
    known, callbacks = namespace_of(trainer).pytorch("callbacks"), list[Any](trainer.callbacks)
    if any(isinstance(c, known.OnExceptionCheckpoint) or getattr(c, "save_on_exception", False) for c in callbacks):
        return
    saver = next((c for c in callbacks if isinstance(c, known.ModelCheckpoint) and c.dirpath), None)
    if saver is None:
        rank_zero_info("SIGTERM: no checkpoint is written, as the Trainer has no ModelCheckpoint")
        return
    path = Path(saver.dirpath, saver.CHECKPOINT_NAME_LAST + saver.FILE_EXTENSION)
    trainer.save_checkpoint(path)
    rank_zero_info(f"SIGTERM: saved {path} after step {trainer.global_step}; go on with ckpt_path='last'")
