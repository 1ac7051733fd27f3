"""From what each rank has measured by its own clock to one timeline, and the figures that add up over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

from lightning_afd.peers import Peers
from lightning_afd.placement import Layout
from lightning_afd.recording.record import NicTraffic, RankClock, Traffic
from lightning_afd.schedule.programs import Programs
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Reduce, Span, Timeline


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank brings to a recording."""

    times: Sequence[float]
    """Start and end of each action of its program, in the program's order and seconds of its own clock."""
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
    nics: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes out and in by NIC, from one rank of each host."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The parts of all ranks together."""

    timeline: Timeline
    """In seconds of the common clock since the first action, whole nanoseconds."""
    clocks: tuple[RankClock, ...]
    traffic: tuple[Traffic, ...]
    nics: tuple[NicTraffic, ...]
    tokens_per_expert: tuple[tuple[int, ...], ...]
    kernels: str


def join(parts: Sequence[Part], layout: Layout, programs: Programs) -> Joined:
    """Join the parts of all ranks, by rank, that executed these programs."""
    hosts = [part.host for part in parts]
    clocks: tuple[RankClock, ...] = (RankClock(),) * len(parts)
    if len(set(hosts)) > 1:
        clocks = common_clock(_timeline(parts, layout, programs, [0.0] * len(parts)), programs.schedule.shape, hosts)
    clocks = tuple(replace(clock, source=part.source) for clock, part in zip(clocks, parts, strict=True))
    firsts = (min((*part.times[:1], *(start for start, _, _ in part.reduces)), default=inf) for part in parts)
    zero = min(first + clock.offset for first, clock in zip(firsts, clocks, strict=True))
    return Joined(
        timeline=_timeline(parts, layout, programs, [clock.offset - zero for clock in clocks]),
        clocks=clocks,
        traffic=tuple(
            Traffic(rank, receiver, channel, messages, nbytes)
            for rank, part in enumerate(parts)
            for (channel, receiver), (messages, nbytes) in part.sent.items()
        ),
        nics=tuple(
            NicTraffic(rank, name, *moved) for rank, part in enumerate(parts) for name, moved in part.nics.items()
        ),
        tokens_per_expert=_sums([part.tokens_per_expert for part in parts if part.tokens_per_expert]),
        kernels=", ".join(sorted(frozenset().union(*(part.kernels for part in parts)))),
    )


def _timeline(parts: Sequence[Part], layout: Layout, programs: Programs, shifts: Sequence[float]) -> Timeline:
    """What all ranks did in the order of time, each rank's times shifted, in whole nanoseconds."""
    spans: list[Span] = []
    reduces: list[Reduce] = []
    for rank, (part, shift) in enumerate(zip(parts, shifts, strict=True)):
        times = [round((time + shift) * 1e9) / 1e9 for time in part.times]
        timed = zip(programs.by_worker[layout.worker_of(rank)], times[::2], times[1::2], strict=True)
        both = layout.collocated
        own = (Span(s.action, rank, start, end, s.worker if both else None) for s, start, end in timed)
        spans += sorted(own, key=lambda span: span.start)  # a computation may have overtaken a dispatch
        for chunk, (start, end, nbytes) in enumerate(part.reduces):
            start, end = (round((time + shift) * 1e9) / 1e9 for time in (start, end))
            reduces.append(Reduce(chunk, rank, start, end, nbytes))
    return Timeline(layout, tuple(spans), tuple(reduces))


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
    most = _bounds(raw, shape, host_of)
    clocks = [
        RankClock(host=h, offset=(most[h][0] - most[0][h]) / 2, accuracy=abs(most[h][0] + most[0][h]) / 2)
        for h in range(len(names))
    ]
    return tuple(clocks[host] for host in host_of)


def _bounds(raw: Timeline, shape: Shape, host_of: Sequence[int]) -> list[list[float]]:
    """The most that offset a may exceed offset b, for each pair of hosts: directly, or over others."""
    count = max(host_of) + 1
    most = [[0.0 if a == b else inf for b in range(count)] for a in range(count)]
    began = {(span.rank, span.action): span.start for span in raw.spans if raw.sends(span)}
    for rank, spans in raw.by_rank.items():
        peers, receiver = Peers(raw.layout, shape, rank), host_of[rank]
        for span in (span for span in spans if span.action.is_transfer and raw.waits(span)):
            for sender in peers.senders(span.action):
                row = most[host_of[sender]]
                row[receiver] = min(row[receiver], span.end - began[sender, span.action])
    for over, a, b in product(range(count), repeat=3):
        most[a][b] = min(most[a][b], most[a][over] + most[over][b])
    return most
