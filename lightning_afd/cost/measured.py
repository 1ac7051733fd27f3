"""Rates of devices and links out of what was measured on the ranks of a job; pure arithmetic on their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from lightning_afd.cost.hardware import Cluster, Link, Scale
from lightning_afd.errors import PlanError

NEVER_SLOWER = 1.03
"""Ranks that are slowed down by less than this when all compute at once don't share anything that matters."""
_APART = 1.2
"""Two estimates of a kind are told apart if one is so many times the other."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One kind of action: what the cost model estimates without any scale, and what it took, in seconds."""

    estimate: float
    seconds: float


Points = Mapping[str, Sequence[Point]]
"""By kind of action (`Device.scales`); every rank measures the same points in the same order."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Messages that were sent one after another in one direction: from the first send to the last byte."""

    messages: int
    nbytes: int
    """Of each."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Handled:
    """What a message takes of a core of the rank that sends it, or gets it, between computations."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one rank has measured."""

    node: int
    together: Points
    """While all ranks computed."""
    alone: Points = field(default_factory=dict)
    """While only one rank of each node did; empty on the others."""
    near: Sequence[Sample] = ()
    """Messages to a rank of the same node."""
    far: Sequence[Sample] = ()
    """Messages to a rank of another node."""
    handled: Sequence[Handled] = ()
    """Messages of growing size; none where cores that compute don't move them."""


def measured_cluster(base: Cluster, ranks: Sequence[Figures]) -> Cluster:
    """`base` with scales, links and shared cores as these ranks have found them; the slowest rank and link count."""
    crowd = slowdown(ranks)
    most = max(sum(1 for other in ranks if other.node == rank.node) for rank in ranks)
    scales = {kind: fit_scale(_slowest(ranks, kind, crowd)) for kind in ranks[0].together}
    near, far = ([samples for rank in ranks if (samples := getattr(rank, way))] for way in ("near", "far"))
    nvlink = fit_link(_slowest_samples(near)) if near else base.nvlink
    nic = fit_link(_slowest_samples(far), base.ports) if far else base.nic
    handling = fit_handling([rank.handled for rank in ranks if rank.handled])
    return replace(
        base,
        device=replace(base.device, name=f"{base.device.name}, measured", scales=scales),
        nvlink=replace(nvlink, **handling),
        nic=replace(nic, **handling),
        at_once=most / crowd if crowd > NEVER_SLOWER else base.at_once,
    )


def slowdown(ranks: Sequence[Figures]) -> float:
    """How many times as long everything takes while all ranks of a node compute; 1 where nobody was measured alone."""
    ratios = [_total(rank.together) / _total(rank.alone) for rank in ranks if rank.alone]
    return max(1.0, *ratios) if ratios else 1.0


def fit_scale(points: Sequence[Point]) -> Scale:
    """The line through two points, or through zero and one point; never with a negative part.

    Raises PlanError for a time that is no time.
    """
    if any(not 0 < point.seconds < float("inf") or point.estimate <= 0 for point in points):
        raise PlanError(f"measured {points}: seconds and estimates must be positive")
    few, many = (choose(points, key=lambda point: point.estimate) for choose in (min, max))
    if many.estimate > _APART * few.estimate and many.seconds > few.seconds:
        factor = (many.seconds - few.seconds) / (many.estimate - few.estimate)
        fixed = few.seconds - factor * few.estimate
        if fixed >= 0:
            return Scale(factor=factor, fixed_us=fixed * 1e6)
    return Scale(factor=sum(p.seconds for p in points) / sum(p.estimate for p in points))


def fit_link(samples: Sequence[Sample], ports: float = 1.0) -> Link:
    """The link that explains samples best: seconds = latency + messages (half + bytes) / rate.

    Least squares of the relative error, over all sets of parts that are not negative. `ports` share the rate.
    """
    fits = [
        _least_squares(samples, parts) for count in (3, 2, 1) for parts in combinations(range(3), count) if 2 in parts
    ]
    possible = [fit for fit in fits if min(fit) >= 0 and fit[2] > 0]
    if not possible:
        raise PlanError(f"the messages {samples} have no rate: longer ones must take longer")
    latency, per_message, per_byte = min(possible, key=lambda fit: _error(samples, fit))
    return Link(
        gb_per_s=1e-9 / per_byte / ports,
        efficiency=1.0,
        latency_us=latency * 1e6,
        half_kib=per_message / per_byte / 1024,
    )


def fit_handling(ranks: Sequence[Sequence[Handled]]) -> dict[str, float]:
    """Fields of a Link: the line through the smallest and the largest message, in the mean of the ranks."""
    if not ranks:
        return {}
    small, large = (_mean([rank[place] for rank in ranks]) for place in (0, -1))
    per_byte = max(0.0, (large.seconds - small.seconds) / (large.nbytes - small.nbytes))
    fixed = max(0.0, small.seconds - per_byte * small.nbytes)
    return {"host_us": fixed * 1e6, "host_us_per_mib": per_byte * 2**20 * 1e6}


def _mean(found: Sequence[Handled]) -> Handled:
    return replace(found[0], seconds=sum(one.seconds for one in found) / len(found))


def _total(points: Points) -> float:
    return sum(point.seconds for found in points.values() for point in found)


def _slowest(ranks: Sequence[Figures], kind: str, crowd: float) -> list[Point]:
    """Each point on its slowest rank, as if it had been there alone."""
    columns = zip(*(rank.together[kind] for rank in ranks), strict=True)
    slowest = (max(column, key=lambda point: point.seconds) for column in columns)
    return [replace(point, seconds=point.seconds / crowd) for point in slowest]


def _slowest_samples(ranks: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [max(column, key=lambda sample: sample.seconds) for column in zip(*ranks, strict=True)]


def _terms(sample: Sample) -> tuple[float, float, float]:
    """What latency, time per message and time per byte are multiplied with."""
    return 1.0, float(sample.messages), float(sample.messages * sample.nbytes)


def _error(samples: Sequence[Sample], fit: Sequence[float]) -> float:
    told = (sum(map(lambda a, b: a * b, fit, _terms(sample))) for sample in samples)
    return sum((value / sample.seconds - 1) ** 2 for value, sample in zip(told, samples, strict=True))


def _least_squares(samples: Sequence[Sample], parts: Sequence[int]) -> tuple[float, float, float]:
    """The parts that explain the samples best where the others are 0 (normal equations, Gauss elimination)."""
    rows = [[_terms(sample)[part] / sample.seconds for part in parts] for sample in samples]
    size = range(len(parts))
    matrix = [[sum(row[i] * row[j] for row in rows) for j in size] + [sum(row[i] for row in rows)] for i in size]
    for i in size:
        if matrix[i][i] <= 0:
            return -1.0, -1.0, -1.0
        for j in size:
            if j != i:
                share = matrix[j][i] / matrix[i][i]
                matrix[j] = [b - share * a for a, b in zip(matrix[i], matrix[j], strict=True)]
    found = [0.0, 0.0, 0.0]
    for i, part in enumerate(parts):
        found[part] = matrix[i][-1] / matrix[i][i]
    return found[0], found[1], found[2]
