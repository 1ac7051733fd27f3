"""From what each rank has measured by its own clock to one timeline, and the figures that add up over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from lightning_afd.peers import Peers
from lightning_afd.placement import Layout
from lightning_afd.recording.record import RankClock, Traffic
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.timeline import Reduce, Span, Timeline

SpanOrReduce = TypeVar("SpanOrReduce", Span, Reduce)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank brings to a recording."""

    times: Sequence[float]
    """Start and end of each action of its program, in seconds of its own clock."""
    reduces: tuple[tuple[float, float, int], ...]
    """Start, end and bytes of each chunk of gradients."""
    sent: Mapping[tuple[str, int], tuple[int, int]]
    """Messages and bytes by channel and receiver."""
    tokens_per_expert: tuple[tuple[int, ...], ...]
    """Per MoE layer, of this rank's own tokens; empty on F ranks."""
    kernels: frozenset[str]
    """What multiplied rows of experts here."""
    host: str
    """Names what ranks share a clock."""
    source: str
    """See RankClock."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The parts of all ranks together."""

    timeline: Timeline
    """In seconds of the common clock since the first action, whole nanoseconds."""
    clocks: tuple[RankClock, ...]
    traffic: tuple[Traffic, ...]
    tokens_per_expert: tuple[tuple[int, ...], ...]
    kernels: str


def join(parts: Sequence[Part], layout: Layout, schedule: Schedule) -> Joined:
    """Join the parts of all ranks, by rank, that executed a schedule."""
    own = [_own_times(rank, part, layout, schedule) for rank, part in enumerate(parts)]
    raw = Timeline(
        layout,
        tuple(span for spans, _ in own for span in spans),
        tuple(reduce for _, reduces in own for reduce in reduces),
    )
    clocks = common_clock(raw, schedule.shape, [part.host for part in parts])
    clocks = tuple(replace(clock, source=part.source) for clock, part in zip(clocks, parts, strict=True))
    return Joined(
        timeline=_moved(raw, [clock.offset for clock in clocks]),
        clocks=clocks,
        traffic=tuple(
            Traffic(rank, receiver, channel, messages, nbytes)
            for rank, part in enumerate(parts)
            for (channel, receiver), (messages, nbytes) in part.sent.items()
        ),
        tokens_per_expert=_sums([part.tokens_per_expert for part in parts if part.tokens_per_expert]),
        kernels=", ".join(sorted(frozenset().union(*(part.kernels for part in parts)))),
    )


def _own_times(rank: int, part: Part, layout: Layout, schedule: Schedule) -> tuple[list[Span], list[Reduce]]:
    actions = zip(schedule.programs[layout.worker_of(rank)], part.times[::2], part.times[1::2], strict=True)
    chunks = enumerate(part.reduces)
    return (
        [Span(action, rank, start, end) for action, start, end in actions],
        [Reduce(chunk, rank, start, end, nbytes) for chunk, (start, end, nbytes) in chunks],
    )


def _moved(raw: Timeline, offsets: Sequence[float]) -> Timeline:
    """Everything by the common clock, from the first action on."""
    zero = min((part.start + offsets[part.rank] for part in raw.parts), default=0.0)
    shifts = [offset - zero for offset in offsets]

    def nanoseconds(time: float) -> float:
        return round(time * 1e9) / 1e9

    spans = (
        Span(s.action, s.rank, nanoseconds(s.start + shifts[s.rank]), nanoseconds(s.end + shifts[s.rank]))
        for s in raw.spans
    )
    reduces = (
        Reduce(r.chunk, r.rank, nanoseconds(r.start + shifts[r.rank]), nanoseconds(r.end + shifts[r.rank]), r.nbytes)
        for r in raw.reduces
    )
    return Timeline(raw.layout, tuple(spans), tuple(reduces))


def _sums(tables: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, ...], ...]:
    """Add tables of one shape, entry by entry."""
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))


def common_clock(raw: Timeline, shape: Shape, hosts: Sequence[str]) -> tuple[RankClock, ...]:
    """Clocks of the ranks against that of rank 0, from the messages of a step, each rank's by its own clock.

    No message arrives before its sender has begun: start_s + o_s <= end_r + o_r for the offsets o of both hosts.
    Messages go both ways, so each offset has a lower and an upper bound; it is put in the middle.
    """
    names = list(dict.fromkeys(hosts))
    host_of = [names.index(host) for host in hosts]
    most = _bounds(raw, shape, host_of) if len(names) > 1 else [[0.0]]
    clocks = [
        RankClock(host=h, offset=(most[h][0] - most[0][h]) / 2, accuracy=abs(most[h][0] + most[0][h]) / 2)
        for h in range(len(names))
    ]
    return tuple(clocks[host] for host in host_of)


def _bounds(raw: Timeline, shape: Shape, host_of: Sequence[int]) -> list[list[float]]:
    """The most that offset a may exceed offset b, for each pair of hosts: directly, or over others."""
    count = max(host_of) + 1
    most = [[0.0 if a == b else float("inf") for b in range(count)] for a in range(count)]
    began = {(span.rank, span.action): span.start for span in raw.spans if span.action.is_transfer}
    for rank, spans in raw.by_rank.items():
        peers, receiver = Peers(raw.layout, shape, rank), host_of[rank]
        for span in (span for span in spans if span.action.is_transfer and raw.waits(span)):
            for sender in peers.senders(span.action):
                row = most[host_of[sender]]
                row[receiver] = min(row[receiver], span.end - began[sender, span.action])
    for over, a, b in product(range(count), repeat=3):
        most[a][b] = min(most[a][b], most[a][over] + most[over][b])
    return most
