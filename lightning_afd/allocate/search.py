"""Local search on measured step times: Algorithm 1 of DisagMoE (2605.11005); what it leaves open are settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lightning_afd.errors import PlanError

Point = tuple[int, ...]
"""Sizes that are searched, (M, N) for example."""
Measure = Callable[[Point], float]
"""Seconds of a real step; called again for the same point only for its repetitions."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How far and how long to look."""

    radius: int = 2
    """Largest difference to the best point in each size (r)."""
    trials: int = 16
    """Points that are measured at most (K)."""
    tolerance: float = 0.02
    """A point is better if its time is smaller by more than this part (eps): below it is noise."""
    repetitions: int = 3
    """Measurements of each point; the smallest counts, as noise only adds time."""

    def __post_init__(self) -> None:
        for name in ("radius", "trials", "repetitions"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: a search needs at least 1")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best point that was measured."""

    point: Point
    """The best one."""
    seconds: float
    """What it took."""
    measured: Mapping[Point, float]
    """All points, in the order in which they were measured."""


def local_search(start: Point, allowed: Callable[[Point], bool], measure: Measure, search: Search) -> Found:
    """Measure the start and its neighbours, nearest first, and go on from the first that is better, while there is one.

    Only measured points are adopted, and the start is one of them: the result is never worse than it.
    """
    measured: dict[Point, float] = {}

    def seconds(point: Point) -> float:
        if point not in measured:
            measured[point] = min(measure(point) for _ in range(search.repetitions))
        return measured[point]

    best = start
    best_seconds = seconds(start)
    improved = True
    while improved:
        improved = False
        for point in neighbours(best, search.radius):
            if len(measured) >= search.trials:
                break
            if point not in measured and allowed(point) and seconds(point) < best_seconds * (1 - search.tolerance):
                best, best_seconds, improved = point, measured[point], True
                break
    return Found(point=best, seconds=best_seconds, measured=measured)


def neighbours(point: Point, radius: int) -> Iterable[Point]:
    """Points with sizes of at least 1 that differ by `radius` at most in each, nearest first."""
    steps: list[Point] = [()]
    for _ in point:
        steps = [(*step, change) for step in steps for change in range(-radius, radius + 1)]
    steps.sort(key=lambda step: (sum(map(abs, step)), step))
    moved = (tuple(size + change for size, change in zip(point, step, strict=True)) for step in steps if any(step))
    return (other for other in moved if min(other) >= 1)
