"""What happened when: one type for measured and simulated steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_afd.placement import Layout, Role
from lightning_afd.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, in seconds of that rank's clock."""

    action: Action
    rank: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step."""

    layout: Layout
    spans: tuple[Span, ...]

    def waits(self, span: Span) -> bool:
        """Whether the span is a receive."""
        return span.action.op == received_op(self.layout.worker_of(span.rank).role)

    def exposed(self, rank: int) -> float:
        """Share of a rank's step in which it waits for messages (0..1)."""
        return exposed_share([span for span in self.spans if span.rank == rank], self.layout.worker_of(rank).role)


def exposed_share(spans: Sequence[Span], role: Role) -> float:
    """Waiting time over step time (0..1) of one rank's spans: communication that no computation hides."""
    if not spans:
        return 0.0
    total = spans[-1].end - spans[0].start
    return waiting_seconds(spans, role) / total if total > 0 else 0.0


def waiting_seconds(spans: Iterable[Span], role: Role) -> float:
    """Seconds in receives."""
    return sum(span.seconds for span in spans if span.action.op == received_op(role))


def received_op(role: Role) -> str:
    """What a rank waits for: an A rank for combines, an F rank for dispatches."""
    return "C" if role == "A" else "D"
