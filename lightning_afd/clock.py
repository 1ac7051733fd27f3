"""When something begins and ends on a rank: by the process's own clock, or by events on the device's stream."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments at little cost; they are read once the step is over, in seconds of `time.perf_counter`."""

    source: str
    """What a recording says about where its times come from."""

    def begin(self) -> None:
        """A step begins; marks of the last one may no longer be read."""

    def mark(self) -> Any:
        """This moment."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When these moments were; may wait for the device."""


class HostClock:
    """The process's own clock: for devices that have done their work when a function returns, as CPUs do."""

    source = "perf_counter"
    mark = staticmethod(time.perf_counter)

    def begin(self) -> None:
        """Nothing to do."""

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class EventClock:
    """Events on the current stream: when the device, which works behind the host's back, gets to a place.

    The host's time of the first event of a step is known to within the wake-up of a thread. Events are used again.
    """

    source = "cuda events"

    def __init__(self, event: Callable[[], Any]) -> None:
        """`event` makes one, as torch.cuda.Event(enable_timing=True) does."""
        self._event = event
        self._events: list[Any] = []
        self._used = 0
        self._zero = 0.0

    def begin(self) -> None:
        self._used = 0
        self.mark().synchronize()
        self._zero = time.perf_counter()

    def mark(self) -> Any:
        if self._used == len(self._events):
            self._events.append(self._event())
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        for event in marks[-1:]:
            event.synchronize()
        return [self._zero + self._events[0].elapsed_time(event) / 1e3 for event in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock that sees what a device really does."""
    return EventClock(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else HostClock()


def host_name() -> str:
    """Names the machine and its start, with which the clocks of its processes began."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
