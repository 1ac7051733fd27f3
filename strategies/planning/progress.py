"""A bar on rank 0 while the ranks are measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_afd.strategies.planning.measured import Progress

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextmanager
def showing_progress(trainer: pl.Trainer) -> Iterator[Progress]:
    """Where the Trainer shows progress; on other ranks, and without its bar, nothing is shown."""
    if trainer.global_rank != 0 or trainer.progress_bar_callback is None:
        yield lambda what, done: None
        return
    from rich.progress import Progress as Bar

    with Bar(transient=True) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda what, done: bar.update(task, description=f"planning: {what}", completed=done)
