"""A thread per rank that sleeps until there is an alarm, then answers for its rank and sees to it that it ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from lightning_afd.runtime import Runtime
from lightning_afd.strategies.notes import ALARM, Activity, Notes


def activity_of(runtime: Runtime | None) -> Activity:
    """What a rank with this runtime is doing, seen from another thread."""
    if runtime is None:
        return Activity(place="before its first step", seconds=0.0, state="outside")
    action, since = runtime.current
    seconds = time.perf_counter() - since
    if action is None:
        return Activity(place="outside of a step", seconds=seconds, state="outside")
    return Activity(place=f"in {action.place()}", seconds=seconds, state="waits" if action.is_transfer else "computes")


class Watch:
    """Costs one blocked request to the store's host, and nothing while all is well."""

    def __init__(self, notes: Notes, rank: int, look: Callable[[], Activity], patience: float) -> None:
        self._notes = notes
        self._rank = rank
        self._look = look
        self._patience = patience
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="afd-watch")

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
        text = self._notes.verdict(f"it is {place}") if cause is None else cause[2]
        return f"rank {self._rank}, still {place}, is ended by force\nlightning_afd.errors.PeerFailure: {text}\n"
