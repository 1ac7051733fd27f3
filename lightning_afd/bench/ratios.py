"""Arithmetic of repetitions: paired ratios with their spread, the bound of a step, losses that should be equal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_afd.errors import PlanError


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of repetitions."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value; quartiles lie between values, as in `statistics.quantiles(method="inclusive")`."""
        if not values:
            raise PlanError("no repetition was measured")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high, len(values))

    def __format__(self, spec: str) -> str:
        """`median (low to high)`, each in this format."""
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratios within each repetition: a machine that gets slower meanwhile does not show in them.

    Raises PlanError where there are not as many of both.
    """
    if len(numerators) != len(denominators):
        raise PlanError(f"{len(numerators)} and {len(denominators)} repetitions are no pairs")
    return Spread.of([one / other for one, other in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What no order of the same work can go below: max(compute-only A, compute-only F, bytes / link rate)."""

    compute: Mapping[str, float]
    """Seconds of the busiest rank of each role, without communication: "A R=4", "F R=4", "AF R=1" (collocated)."""
    wire: float
    """Seconds that the busiest direction of any rank takes on its link."""

    @property
    def seconds(self) -> float:
        return max(*self.compute.values(), self.wire)

    @property
    def by(self) -> str:
        """What it is that bounds: a role, or "wire"."""
        parts = {**self.compute, "wire": self.wire}
        return max(parts, key=lambda name: parts[name])


def busiest_bytes(sent: Sequence[Mapping[int, int]]) -> int:
    """The most bytes that any rank sends, or receives, in one step; `sent[r]` has those of rank r by receiver."""
    out = [sum(row.values()) for row in sent]
    into = [sum(row.get(rank, 0) for row in sent) for rank in range(len(sent))]
    return max(*out, *into)


def ring_bytes(nbytes: float, ranks: int) -> float:
    """What each rank of a ring sends (and receives) to sum so many bytes: 2 (n - 1) / n of them."""
    return 2 * (ranks - 1) / ranks * nbytes


def disagreement(losses: Mapping[str, Sequence[float]]) -> float:
    """The largest relative difference between contenders of the loss of the same step; 0 for one of them.

    Where contenders have made different numbers of steps, those count that all have made.
    """
    worst = 0.0
    for same_step in zip(*losses.values(), strict=False):
        middle = statistics.median(same_step)
        worst = max(worst, *(abs(loss - middle) / abs(middle) for loss in same_step))
    return worst
