"""What happened when: one type for measured and simulated steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lightning_afd.placement import Layout, Role, Worker
from lightning_afd.schedule.actions import Action

Lane = Literal["compute", "send", "receive", "reduce"]
"""What a rank is doing: it computes, packs and sends a message, waits for one, or sums gradients over replicas."""
LANES: tuple[Lane, ...] = ("compute", "send", "receive", "reduce")


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, in seconds of that rank's clock."""

    action: Action
    rank: int
    """Global rank."""
    start: float
    end: float
    worker: Worker | None = None
    """As which of its workers, where the rank of a collocated layout has two; None: as its only one."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Reduce:
    """One chunk of dense gradients, summed over the ranks that hold the same parameters, in seconds like a Span."""

    chunk: int
    """Its number in the step."""
    rank: int
    """Global rank."""
    start: float
    end: float
    nbytes: float = 0
    """Size of the chunk; 0 where it is not known."""

    def __str__(self) -> str:
        return f"S{self.chunk}"

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step; each rank's stand in the order in which it executed them."""

    layout: Layout
    """Of the ranks; a simulated one has one rank per worker."""
    spans: tuple[Span, ...]
    reduces: tuple[Reduce, ...] = ()
    """Sums of gradients, which may lie below spans."""

    @property
    def parts(self) -> tuple[Span | Reduce, ...]:
        """Everything that takes time on a rank."""
        return (*self.spans, *self.reduces)

    @property
    def start(self) -> float:
        """When the first action of any rank begins."""
        return min((part.start for part in self.parts), default=0.0)

    @property
    def end(self) -> float:
        """When the last action or reduce of any rank ends."""
        return max((part.end for part in self.parts), default=0.0)

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return self.end - self.start

    @cached_property
    def by_rank(self) -> Mapping[int, tuple[Span, ...]]:
        """The spans of each rank that has any, by ascending rank."""
        found: dict[int, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.rank, []).append(span)
        return {rank: tuple(found[rank]) for rank in sorted(found)}

    def lane(self, span: Span) -> Lane:
        """Where a span belongs."""
        if not span.action.is_transfer:
            return "compute"
        return "receive" if self.waits(span) else "send"

    def waits(self, span: Span) -> bool:
        """Whether the span is a receive."""
        return is_receive(span.action, self.worker(span).role, self._segments[span.rank])

    def sends(self, span: Span) -> bool:
        """Whether the span begins to send a message, as an exchange does, too."""
        return span.action.is_exchange or (span.action.is_transfer and not self.waits(span))

    def worker(self, span: Span) -> Worker:
        """As which of its workers a rank has executed a span."""
        return span.worker or self._only[span.rank]

    def exposed(self, rank: int) -> float:
        """Share of a rank's step in which it waits for messages (0..1)."""
        return exposed_share(self.by_rank.get(rank, ()), self.layout.worker_of(rank).role)

    @cached_property
    def _only(self) -> Mapping[int, Worker]:
        """The worker of each rank that has one."""
        return {rank: self.layout.worker_of(rank) for rank in self.by_rank}

    @cached_property
    def _segments(self) -> Mapping[int, frozenset[int]]:
        """The attention segments of each rank."""
        return {rank: segments_of(spans) for rank, spans in self.by_rank.items()}


def exposed_share(spans: Sequence[Span], role: Role) -> float:
    """Waiting time over step time (0..1) of one rank's spans: communication that no computation hides."""
    if not spans:
        return 0.0
    total = spans[-1].end - spans[0].start
    return waiting_seconds(spans, role) / total if total > 0 else 0.0


def waiting_seconds(spans: Sequence[Span], role: Role) -> float:
    """Seconds in receives of one rank's spans; `role` is that of a rank with one role."""
    segments = segments_of(spans)
    return sum(span.seconds for span in spans if is_receive(span.action, _role(span, role), segments))


def _role(span: Span, only: Role) -> Role:
    return only if span.worker is None else span.worker.role


def segments_of(spans: Iterable[Span]) -> frozenset[int]:
    """The attention segments that a rank has computed."""
    return frozenset(span.action.layer for span in spans if span.action.op == "A")


def is_receive(action: Action, role: Role, segments: frozenset[int]) -> bool:
    """Whether a rank with these segments waits in an action: A for combines, F for dispatches and in exchanges, both
    for hops and router logits, which come back to the rank of their segment and go forward to another one.
    """
    if action.op in "HL":
        return (action.phase == "b") == (action.layer in segments)
    return action.op in ("C" if role == "A" else "DXY")
