"""Run a schedule for real with given durations in the place of computation: what a simulated step has to agree with.

Runtime, links, receives ahead and transport are those of training. A computation sleeps for its seconds under a Load,
and a transfer is a message of its bytes that counts as arrived no sooner than the latency of its link says. What the
rates of links say is left to the real network.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from lightning_afd.load import Load
from lightning_afd.peers import Peers
from lightning_afd.placement import Layout
from lightning_afd.receives import Expected, Receives
from lightning_afd.runtime import Runtime
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.schedule.shape import Schedule
from lightning_afd.timeline import Span
from lightning_afd.transport.base import Transport
from lightning_afd.transport.link import Link
from lightning_afd.transport.wire import Section

CPU = torch.device("cpu")


class Clock:
    """Seconds on which the processes of one host agree."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class Rehearsal:
    """One rank of a schedule whose workers are one rank each; the ranks' clocks must agree."""

    def __init__(
        self, schedule: Schedule, load: Load, rank: int, transport: Transport, clock: Clock | None = None
    ) -> None:
        shape = schedule.shape
        layout = Layout(attention=1, ffn=1, groups=shape.groups, head=shape.head)
        worker = layout.worker_of(rank)
        self._program = [Step(worker, action) for action in schedule.programs[worker]]
        self._load = load
        self._clock = clock or Clock()
        self._peers = Peers(layout, shape, rank)
        self._expected = Expected(self._peers, self._program)
        self._link = Link(transport, rank, CPU)
        self._step = 0
        self._receives: Receives
        computes = dict.fromkeys([(op, phase) for op in "AET" for phase in "fbw"], self._compute)
        transfers = dict.fromkeys([(op, phase) for op in "DCHL" for phase in "fb"], self._transfer)
        self._runtime = Runtime(rank, {worker: {**computes, **transfers}})

    def run(self) -> list[Span]:
        """One step; returns its spans."""
        self._step += 1
        self._link.begin(self._step)
        self._receives = Receives(self._link, self._peers, self._expected)
        self._runtime.run(self._program)
        self._link.release()
        return self._runtime.spans

    def _compute(self, action: Action) -> None:
        factor = self._load.imbalance if action.op == "E" else 1
        self._clock.sleep_until(self._clock.now() + self._load.seconds(action) * factor)

    def _transfer(self, action: Action) -> None:
        if self._peers.receives(action):
            for posted in self._receives.take(action):
                _, when, _ = posted.wait()
                self._clock.sleep_until(when.item())
        else:
            message = self._message(action)
            for peer in self._receivers(action):
                self._link.send(action, peer, message, message.numel())

    def _message(self, action: Action) -> Tensor:
        """Bytes without meaning in the place of x, and of w the time from which the message counts as arrived."""
        x = Section(1, int(self._load.bytes(action)) // 4, torch.float32)
        sections = [x, Section(1, 1, torch.float64), Section(1, 1, torch.int32)]
        message, (_, when, _) = self._link.allocate(action, sections)
        when.fill_(self._clock.now() + self._load.links[action.op].latency)
        return message

    def _receivers(self, action: Action) -> range:
        return self._peers.layout.ranks_of(self._peers.shape.endpoints(action)[1])
