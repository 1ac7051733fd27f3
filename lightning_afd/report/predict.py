"""A recorded step once more, on paper: the same schedule, run by the simulator with costs that were measured in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from lightning_afd.load import Link, Load, apart, collocated
from lightning_afd.placement import Worker
from lightning_afd.recording import Recording
from lightning_afd.schedule.actions import Action, Op
from lightning_afd.simulate import simulate
from lightning_afd.timeline import Reduce, Span, Timeline
from lightning_afd.waits import Wait

OPS: tuple[Op, ...] = ("D", "C", "X", "Y", "H", "L")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A simulated step; its timeline has one rank per worker."""

    timeline: Timeline
    link: Link
    """What was measured of the way of a message: one class of links for everything."""
    observed: int
    """Messages that were waited for before they were sent: those by which the link was measured."""


def predict(recording: Recording, waits: Sequence[Wait]) -> Prediction:
    """Simulate a recorded step; `waits` are its receives.

    A compute action takes the median over micro-batches of what it took on the slowest rank of its worker; a message
    takes latency + bytes / rate, a line through the medians of all kinds of messages (`link_of`); a sum of gradients
    starts behind the layer behind whose backward it started, and takes as long. What is left out: packing on the
    sender's side (a message's way includes it, but the rank goes on at once), and everything that varies. A rank with
    both roles works for one of them at a time there, too, but for whichever can go on first.
    """
    kinds = bytes_by_kind(recording)
    link, observed = link_of(waits, kinds)
    load = Load(
        seconds=_seconds(recording.timeline),
        bytes=lambda action: kinds.get(action.op + action.phase, 0.0),
        links=dict.fromkeys(OPS, link),
        reduce=_reduces(recording.timeline),
        machine=collocated if recording.timeline.layout.collocated else apart,
    )
    timeline = simulate(recording.schedule(), load).timeline
    return Prediction(timeline=timeline, link=link, observed=observed)


def bytes_by_kind(recording: Recording) -> dict[str, float]:
    """Mean bytes of one action by op and phase ("Df"), all ranks of the sender together."""
    sums: dict[str, float] = defaultdict(float)
    for traffic in recording.traffic:
        sums[traffic.channel] += traffic.nbytes
    actions: dict[str, set[Action]] = defaultdict(set)
    for span in recording.timeline.spans:
        actions[span.action.op + span.action.phase].add(span.action)
    return {kind: total / max(len(actions[kind]), 1) for kind, total in sums.items()}


def link_of(waits: Iterable[Wait], kinds: dict[str, float]) -> tuple[Link, int]:
    """The line of least squares through (bytes, median seconds) of each kind of message, and how many were seen.

    Only messages that a rank already waited for when they were sent tell how long they travel. Without any the way
    takes no time.
    """
    ways: dict[str, list[float]] = defaultdict(list)
    for wait in waits:
        if wait.for_peer > 0:
            ways[wait.span.action.op + wait.span.action.phase].append(wait.for_net)
    points = [(kinds.get(kind, 0.0), median(seconds), len(seconds)) for kind, seconds in ways.items()]
    latency, per_byte = fit(points)
    rate = 1 / per_byte if per_byte > 0 else inf
    return Link(attention=rate, ffn=rate, latency=latency), sum(map(len, ways.values()))


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Constant and slope, neither below 0, of the line of least squares through points (x, y, weight)."""
    total = sum(weight for *_, weight in points)
    if not total:
        return 0.0, 0.0
    mean_x = sum(x * weight for x, _, weight in points) / total
    mean_y = sum(y * weight for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread if spread else 0.0
    if slope <= 0:
        return mean_y, 0.0
    if slope * mean_x > mean_y:  # the line would start below 0: one through the origin
        return 0.0, sum(w * x * y for x, y, w in points) / sum(w * x * x for x, _, w in points)
    return mean_y - slope * mean_x, slope


def _seconds(timeline: Timeline) -> Callable[[Action], float]:
    """Seconds of a compute action: the median over micro-batches, the slowest rank of each."""
    slowest: dict[Action, float] = {}
    for span in timeline.spans:
        if not span.action.is_transfer:
            slowest[span.action] = max(slowest.get(span.action, 0.0), span.seconds)
    stages: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for action, seconds in slowest.items():
        stages[action.op, action.layer, action.phase].append(seconds)
    medians = {stage: median(values) for stage, values in stages.items()}
    return lambda action: medians.get((action.op, action.layer, action.phase), 0.0)


def _reduces(timeline: Timeline) -> Callable[[Worker, int], float]:
    """Seconds of a worker's reduces by the layer behind whose backward they started, of its slowest rank."""
    by_rank: dict[tuple[int, int], float] = defaultdict(float)
    for reduce in timeline.reduces:
        by_rank[reduce.rank, _layer_before(reduce, timeline.by_rank.get(reduce.rank, ()))] += reduce.seconds
    found: dict[tuple[Worker, int], float] = defaultdict(float)
    for (rank, layer), seconds in by_rank.items():
        key = timeline.layout.worker_of(rank), layer
        found[key] = max(found[key], seconds)
    return lambda worker, layer: found.get((worker, layer), 0.0)


def _layer_before(reduce: Reduce, spans: Sequence[Span]) -> int:
    """The layer whose backward was finished last when a reduce started, or is finished first of all."""
    ends = {span.action.layer: span.end for span in spans if span.action.phase in "bw" and span.action.op in "AET"}
    before = [(end, layer) for layer, end in ends.items() if end <= reduce.start]
    return max(before)[1] if before else min(((end, layer) for layer, end in ends.items()), default=(0.0, 0))[1]
