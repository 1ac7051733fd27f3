"""A thread per rank that sleeps until there is an alarm, then answers for its rank and sees to it that it ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_afd.placement import Layout
from lightning_afd.runtime import Runtime
from lightning_afd.strategies.notes import ALARM, Activity, Notes, describe_cause


def activity_of(runtime: Runtime | None) -> Activity:
    """What a rank with this runtime is doing, seen from another thread."""
    action, since = (None, None) if runtime is None else runtime.current
    seconds = 0.0 if since is None else time.perf_counter() - since
    if action is not None:
        state: Any = "waits" if action.is_transfer else "computes"
        return Activity(place=f"in {action.place()}", seconds=seconds, state=state)
    place, collective = "before its first step" if runtime is None else "outside of a step", _collective()
    if collective is not None:
        return Activity(place=f"{place}, in {collective}", seconds=seconds, state="waits")
    return Activity(place=place, seconds=seconds, state="outside")


def _collective() -> str | None:
    """The function of torch.distributed in which the main thread waits for the other ranks, whoever has called it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = None
    while frame is not None:
        if frame.f_globals.get("__name__") == dist.distributed_c10d.__name__:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


class Watch:
    """Costs one blocked request to the store's host, and nothing while all is well."""

    def __init__(self, notes: Notes, rank: int, look: Callable[[], Activity], patience: float) -> None:
        self._notes = notes
        self._rank = rank
        self._look = look
        self._patience = patience
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="afd-watch")

    def rename(self, layout: Layout) -> None:
        """From now on ranks are named by their roles in this layout."""
        self._notes.rename(layout)

    def start(self) -> None:
        self._thread.start()

    def stop(self, notes: Notes) -> None:
        """The main thread, whose notes these are, stops by itself: nothing has to be ended by force."""
        self._ended.set()
        notes.stop()
        self._thread.join(1.0)

    def _run(self) -> None:
        if self._notes.wait() != ALARM:
            return
        self._notes.answer(self._look())
        if not self._ended.wait(self._patience):
            sys.stderr.write(self._last_words())
            sys.stderr.flush()
            os._exit(1)

    def _last_words(self) -> str:
        """The first cause, as this rank's main thread would have raised it."""
        place = self._look().place
        cause = self._notes.cause()
        text = self._notes.verdict(f"it is {place}") if cause is None else describe_cause(*cause)
        return f"rank {self._rank}, still {place}, is ended by force\nlightning_afd.errors.PeerFailure: {text}\n"
