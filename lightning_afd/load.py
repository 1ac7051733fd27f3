"""What a step costs that is simulated: durations of actions, bytes of transfers, links and machines they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_afd.errors import PlanError
from lightning_afd.placement import Role, Worker
from lightning_afd.schedule.actions import Action, Op
from lightning_afd.schedule.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Link:
    """A class of links: what travels over equal Links shares their lanes."""

    attention: float
    """Bytes per second that an A worker, all its ranks together, can send, and at the same time receive."""
    ffn: float
    """The same for an F worker."""
    latency: float = 0
    """Seconds from the end of sending to the arrival."""

    def rate(self, role: Role) -> float:
        """Bytes per second in each direction."""
        return self.attention if role == "A" else self.ffn


Machine = Callable[[Worker], Worker]


def apart(worker: Worker) -> Worker:
    """Every worker has lanes of its own."""
    return worker


def collocated(worker: Worker) -> Worker:
    """A and F worker of a group are the same ranks, and share their lanes."""
    return Worker("A", worker.group)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Reduces that share lanes with transfers, below them: a chunk starts when nothing is on them or waits for them.

    FlowMoE (2510.00207), section 3.3. What has started is not interrupted.
    """

    link: Link
    """The class of links whose two lanes a chunk occupies."""
    longest: float = math.inf
    """Seconds of a chunk: S_p over the rate; infinite for one chunk per layer."""
    launch: float = 0
    """Seconds that each chunk takes beside that."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the actions of a step cost."""

    seconds: Callable[[Action], float]
    """Seconds of a compute action (A, E, T)."""
    bytes: Callable[[Action], float]
    """Bytes of a transfer, all ranks of the sender together."""
    links: Mapping[Op, Link]
    """What transfers travel over; X and Y where they exist."""
    imbalance: float = 1
    """How much more than its share the busiest F rank has: experts and what an F worker sends and receives take so
    many times as long, since everyone waits for that rank."""
    reduce: Callable[[Worker, int], float] = lambda worker, layer: 0
    """Seconds of the all-reduce of a layer's gradients between the ranks of a worker; it starts behind the layer's last
    backward or weight gradient, or at the first place (S) behind it in schedules that have such places."""
    chunks: Chunks | None = None
    """How reduces share the lanes of transfers; without it they have one of their own."""
    machine: Machine = apart
    """Whose lanes a worker uses."""


def by_kind(shape: Shape, values: Mapping[str, float]) -> Callable[[Action], float]:
    """Costs from a table such as {"Af": 1.0, "Ab": 2.0, "Ef": ...}; raises PlanError for an action not in it.

    The tail is looked up as T, wherever it runs; where F ranks run it, the segment that hands over to it is free.
    """

    def value(action: Action) -> float:
        if action.op == "A" and action.layer == shape.layers and shape.hands_over():
            return 0
        kind = ("T" if shape.runs_tail(action) else action.op) + action.phase
        if kind not in values:
            raise PlanError(f"no cost for {action.place()}: the table has {' '.join(values)}, add {kind}")
        return values[kind]

    return value
