"""What happened when: one type for measured and simulated steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_afd.placement import Layout, Role, Worker
from lightning_afd.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, in seconds of that rank's clock."""

    action: Action
    rank: int
    start: float
    end: float
    worker: Worker | None = None
    """As which of its workers, where the rank of a collocated layout has two; None: as its only one."""

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
        return is_receive(span.action, _role(span, self._role(span.rank)), segments_of(self._of(span.rank)))

    def exposed(self, rank: int) -> float:
        """Share of a rank's step in which it waits for messages (0..1)."""
        return exposed_share(self._of(rank), self._role(rank))

    def _of(self, rank: int) -> list[Span]:
        return [span for span in self.spans if span.rank == rank]

    def _role(self, rank: int) -> Role:
        return self.layout.worker_of(rank).role


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
    """Whether a rank with these segments waits in an action: A for combines, F for dispatches, and both for hops and
    router logits, which come back to the rank of their segment and go forward to another one.
    """
    if action.op in "HL":
        return (action.phase == "b") == (action.layer in segments)
    return action.op == ("C" if role == "A" else "D")
