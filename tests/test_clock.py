"""Times of a device that works behind the host's back, by events on its stream; here on a device of paper."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_afd.clock import EventClock, HostClock, clock_of
from lightning_afd.placement import Worker
from lightning_afd.runtime import Runtime
from lightning_afd.schedule.actions import Action, Step


class Device:
    """Executes nothing, but knows how many milliseconds it is through with; its host only hands work over."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made = 0
        self.waited_for: list[Event] = []

    def work(self, milliseconds: float) -> None:
        """A kernel."""
        self.now += milliseconds

    def event(self) -> Event:
        """One that measures time."""
        self.made += 1
        return Event(self)


class Event:
    """As torch.cuda.Event(enable_timing=True)."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at: float | None = None

    def record(self) -> None:
        """The device will pass here."""
        self.at = self._device.now

    def synchronize(self) -> None:
        """Wait until it has."""
        assert self.at is not None
        self._device.waited_for.append(self)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds; fails where the device may not have passed yet."""
        assert self.at is not None and later.at is not None
        passed = max((event.at for event in self._device.waited_for if event.at is not None), default=-1.0)
        assert later.at <= passed, "read before the device was there"
        return later.at - self.at


A0 = Worker("A", 0)


def steps(names: str) -> tuple[Step, ...]:
    return tuple(Step(A0, Action.parse(name)) for name in names.split())


def test_spans_and_reduces_are_those_of_the_device() -> None:
    device = Device()
    milliseconds = {"A": 250.0, "D": 500.0}
    handlers = {(op, "f"): lambda action: device.work(milliseconds[action.op]) for op in "AD"}
    runtime = Runtime(0, {A0: handlers})
    runtime.clock = EventClock(device.event)
    for events in (7, 9):
        before = time.perf_counter()
        runtime.run(steps("A0f0 D0f0"))
        after = time.perf_counter()
        for chunk in range((events - 5) // 2):
            device.work(1000)
            with runtime.reducing(64 + chunk):
                device.work(125)
        zero = runtime.spans[0].start
        assert before <= zero <= after
        assert [t - zero for s in runtime.spans for t in (s.start, s.end)] == pytest.approx([0, 0.25, 0.25, 0.75])
        ends = [(r.start - zero, r.end - zero, r.nbytes) for r in runtime.reduces]
        assert ends[0] == pytest.approx((1.75, 1.875, 64)) and len(ends) == (events - 5) // 2
        assert device.made == events  # one at the start, two per action and chunk, used again in the second step


def test_the_host_clock_does_not_see_what_the_device_does() -> None:
    device = Device()
    runtime = Runtime(0, {A0: {("A", "f"): lambda action: device.work(1e6)}})
    runtime.run(steps("A0f0"))
    with runtime.reducing(8):
        device.work(1e6)
    assert runtime.spans[0].seconds < 100 and runtime.reduces[0].seconds < 100
    assert (str(runtime.reduces[0]), runtime.reduces[0].nbytes) == ("S0", 8)


def test_the_clock_is_changed_between_steps_only() -> None:
    device = Device()
    runtime = Runtime(0, {A0: {("A", "f"): lambda action: device.work(1000)}})
    runtime.clock = EventClock(device.event)
    runtime.run(steps("A0f0"))
    runtime.clock = HostClock()
    assert runtime.spans[0].seconds == pytest.approx(1)
    with runtime.reducing(8):
        device.work(2000)
    assert runtime.reduces[0].seconds == pytest.approx(2)
    runtime.run(steps("A0f0 A0f1"))
    assert len(runtime.spans) == 2 and runtime.reduces == [] and runtime.spans[0].seconds < 1


def test_cuda_devices_have_event_clocks() -> None:
    assert isinstance(clock_of(torch.device("cuda", 0)), EventClock)
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
