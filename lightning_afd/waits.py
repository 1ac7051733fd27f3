"""What a rank waited for: the other side's computation, or the network; measured and simulated steps alike.

A rank waits in a receive. Until the last of its senders has begun to send, it waits for them: for A ranks (wait_for_A)
or for F ranks (wait_for_F), who are still computing or waiting themselves. From then on it waits for the network
(wait_for_net): packing, queues of the NIC and the way itself; in an exchange, its own packing, too. What is left of a
step, when a rank neither works nor waits for a message, is its bubble: before its first action, behind its last one,
and between two of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil, inf
from typing import TypeVar

from lightning_afd.errors import ScheduleError
from lightning_afd.peers import Peers
from lightning_afd.placement import Role, Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Reduce, Span, Timeline

CAUSES = ("wait_for_A", "wait_for_net", "wait_for_F")
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Wait:
    """One receive."""

    span: Span
    """The receive."""
    sender: Role
    """Role of those who send."""
    sent: float
    """When the last of the senders began, but no earlier than the receive and no later than its end."""

    @property
    def for_peer(self) -> float:
        """Seconds of waiting for the senders."""
        return self.sent - self.span.start

    @property
    def for_net(self) -> float:
        """Seconds of waiting for the network."""
        return self.span.end - self.sent

    @property
    def seconds(self) -> Mapping[str, float]:
        """Both, by cause."""
        return {f"wait_for_{self.sender}": self.for_peer, "wait_for_net": self.for_net}


def waits_of(timeline: Timeline, shape: Shape) -> tuple[Wait, ...]:
    """Every receive of a step, by rank, in the order of execution; `shape` is that of the schedule.

    Raises ScheduleError for a message that nobody sent.
    """
    found, last = [], _LastSend(timeline)
    for rank, spans in timeline.by_rank.items():
        senders_of = _Senders(Peers(timeline.layout, shape, rank))
        for span in spans:
            if span.action.is_transfer and (senders := senders_of.of(timeline.worker(span), span.action)):
                role = shape.endpoints(span.action)[0].role
                began = last.of(senders, role, span)
                found.append(Wait(span, role, min(max(began, span.start), span.end)))
    return tuple(found)


class _Senders:
    """The senders of what a rank receives, none for what it sends; asked once per layer, since there are many spans."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._known: dict[tuple[Worker, str, str, int], tuple[int, ...]] = {}

    def of(self, worker: Worker, action: Action) -> tuple[int, ...]:
        """Of what the rank does as `worker`."""
        key = worker, action.op, action.phase, action.layer
        if key not in self._known:
            receives = self._peers.shape.receives(worker, action)
            self._known[key] = self._peers.senders(action) if receives else ()
        return self._known[key]


class _LastSend:
    """When the last of several ranks began to send something; found once for all that receive from them."""

    def __init__(self, timeline: Timeline) -> None:
        self._began = {
            rank: {(timeline.worker(s).role, s.action): s.start for s in spans if s.action.is_transfer}
            for rank, spans in timeline.by_rank.items()
        }
        self._known: dict[tuple[tuple[int, ...], Action], float] = {}

    def of(self, senders: tuple[int, ...], role: Role, span: Span) -> float:
        """Of the action of a receive, which they send in this role; raises ScheduleError where one of them has none."""
        key = senders, span.action
        if key not in self._known:
            missing = [rank for rank in senders if (role, span.action) not in self._began.get(rank, {})]
            if missing:
                text = f"rank {span.rank} waits in {span.action}, but the timeline has none of rank {missing[0]}"
                raise ScheduleError(text)
            self._known[key] = max(self._began[rank][role, span.action] for rank in senders)
        return self._known[key]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How a rank spends a step, or several ranks on the average: seconds that add up to `step`."""

    compute: float
    """Attention, experts, tail."""
    send: float
    """Packing messages and handing them over."""
    reduce: float
    """Sums of gradients over replicas that hide behind nothing else."""
    wait_for_A: float
    """Until the last A rank that sends has begun to."""
    wait_for_net: float
    """From then on."""
    wait_for_F: float
    """Until the last F rank that sends has begun to."""
    bubble: float
    """Whatever is left."""

    @property
    def step(self) -> float:
        """Seconds of the step, from the first action of any rank to the end of the last one."""
        return sum(self.seconds().values())

    @property
    def busy(self) -> float:
        """Seconds of own work."""
        return self.compute + self.send

    @property
    def exposed(self) -> float:
        """Seconds of waiting for messages."""
        return self.wait_for_A + self.wait_for_net + self.wait_for_F

    def seconds(self) -> dict[str, float]:
        """All parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def shares(self) -> dict[str, float]:
        """All parts, and busy and exposed, over the step (0..1)."""
        step = self.step or 1.0
        parts = self.seconds() | {"busy": self.busy, "exposed": self.exposed}
        return {name: seconds / step for name, seconds in parts.items()}


def usage_of(timeline: Timeline, waits: Sequence[Wait]) -> dict[int, Usage]:
    """How each rank spends the step."""
    waited = {rank: dict.fromkeys(CAUSES, 0.0) for rank in timeline.by_rank}
    for wait in waits:
        waiting = waited[wait.span.rank]
        waiting["wait_for_A" if wait.sender == "A" else "wait_for_F"] += wait.for_peer
        waiting["wait_for_net"] += wait.for_net
    reduces = _grouped(timeline.reduces, lambda reduce: reduce.rank)
    step = timeline.seconds
    found = {}
    for rank, spans in timeline.by_rank.items():
        compute = sum(span.seconds for span in spans if not span.action.is_transfer)
        transfer = sum(span.seconds for span in spans if span.action.is_transfer)
        waiting = waited[rank]
        send = transfer - sum(waiting.values())
        reduce = _uncovered(reduces.get(rank, []), spans)
        bubble = step - compute - transfer - reduce
        found[rank] = Usage(compute=compute, send=send, reduce=reduce, bubble=bubble, **waiting)
    return found


def _uncovered(reduces: Iterable[Reduce], spans: Sequence[Span]) -> float:
    """Seconds in which reduces are on their way and their rank executes no action."""
    ends, total = [span.end for span in spans], 0.0
    for first, last in _joined(reduces):
        total += last - first
        for span in spans[bisect_left(ends, first) :]:
            if span.start >= last:
                break
            total -= min(span.end, last) - max(span.start, first)
    return total


def _joined(reduces: Iterable[Reduce]) -> Iterator[tuple[float, float]]:
    """Start and end of each time in which some are on their way: at the end of a step several are, at once."""
    first = last = -inf
    for reduce in sorted(reduces, key=lambda reduce: reduce.start):
        if reduce.start > last:
            if last > first:
                yield first, last
            first = reduce.start
        last = max(last, reduce.end)
    if last > first:
        yield first, last


def mean_usage(usages: Iterable[Usage]) -> Usage:
    """The average of several ranks (at least one)."""
    every = [usage.seconds() for usage in usages]
    return Usage(**{name: sum(one[name] for one in every) / len(every) for name in every[0]})


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of several durations in seconds: each is the smallest that so many percent do not exceed."""

    count: int
    total: float
    """All together."""
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Quantiles:
        """Of at least one duration."""
        ordered = sorted(seconds)
        p50, p95, p99 = (ordered[ceil(len(ordered) * percent / 100) - 1] for percent in (50, 95, 99))
        return cls(len(ordered), sum(ordered), p50, p95, p99)


def waits_by_message(waits: Iterable[Wait]) -> dict[str, dict[str, Quantiles]]:
    """Waits by op and phase of the message (`Df`), then by cause."""
    return {kind: _by_cause(own) for kind, own in _grouped(waits, _message).items()}


def waits_by_stage(waits: Iterable[Wait], shape: Shape) -> dict[str, dict[str, Quantiles]]:
    """Waits by the stage whose input was missing (attention segment `A3`, experts `E3`, tail `T4`), then by cause."""
    return {stage: _by_cause(own) for stage, own in _grouped(waits, lambda w: stage_of(w.span.action, shape)).items()}


def compute_by_stage(timeline: Timeline) -> dict[str, Quantiles]:
    """Durations of compute actions by op, layer and phase (`A3f`)."""
    spans = [span for span in timeline.spans if not span.action.is_transfer]
    stages = _grouped(spans, lambda span: f"{span.action.op}{span.action.layer}{span.action.phase}")
    return {stage: Quantiles.of(span.seconds for span in own) for stage, own in stages.items()}


def stage_of(action: Action, shape: Shape) -> str:
    """The stage that computes an action, or that needs what a transfer brings."""
    if not action.is_transfer:
        return f"{action.op}{action.layer}"
    if action.op in "DX":
        return f"E{action.layer}"
    if action.phase == "b":
        return f"A{action.layer}"
    to_tail = action.op == "L" or action.layer == shape.layers
    return f"{'T' if shape.hands_over() else 'A'}{shape.layers}" if to_tail else f"A{action.layer + 1}"


def _message(wait: Wait) -> str:
    return wait.span.action.op + wait.span.action.phase


def _by_cause(waits: Sequence[Wait]) -> dict[str, Quantiles]:
    seconds = {cause: [w.seconds[cause] for w in waits if cause in w.seconds] for cause in CAUSES}
    return {cause: Quantiles.of(values) for cause, values in seconds.items() if values}


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the order in which keys come up."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
