"""Algorithm 1 of DisagMoE (2605.11005) at the start of a fit: layouts near the plan's are tried on real steps.

Rank 0 searches; the others follow it from layout to layout. What is timed is a model of a few MoE layers; its time is
scaled by what the cost model says of the whole model over what it says of the few layers, on the same layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from lightning_afd.allocate.replica import Replicas, predicted_seconds
from lightning_afd.allocate.request import Candidate
from lightning_afd.allocate.search import Found, Point, Search, local_search
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.planning.measured import Progress
from lightning_afd.strategies.planning.steps import StepTimer, Timing

FEW = 2
"""MoE layers of the timed model for each group of the deepest layout."""


class Timer(Protocol):
    """Collective: seconds of the fastest of some steps on a layout."""

    def seconds(self, layout: Layout) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The layout that is best by measure, and how it was found."""

    layout: Layout
    lines: tuple[str, ...] = ()


class Trials:
    """The search, on all ranks."""

    def __init__(
        self,
        strategy: RankedStrategy,
        module: nn.Module,
        config: AFDConfig,
        deadline: float,
        timer: Callable[..., Timer] = StepTimer,
    ) -> None:
        self._strategy = strategy
        self._module = module
        self._config = config
        self._deadline = deadline
        self._make_timer = timer

    def run(self, job: Replicas, start: Candidate, progress: Progress) -> Tried:
        """Collective: never worse than the start by measure; the start itself where there is no time or no choice."""
        neighbours = start.layout.neighbours
        layouts = {point_of(layout): replace(layout, neighbours=neighbours) for layout in possible(job)}
        planning, cost = self._config.planning, (self._config.planning.repetitions + 1) * start.seconds
        has_time = time.perf_counter() + 2 * cost < self._deadline
        if not self._agree(planning.trials > 1 and len(layouts) > 1 and has_time and start.passes == 1):
            return Tried(layout=start.layout)
        few = with_few_layers(job, FEW * max(layout.depth for layout in layouts.values()))
        timing = Timing(
            rows=job.rows,
            tokens=job.length,
            layers=len(few.request.model.moe),
            repetitions=planning.repetitions,
            candidate=start,
        )
        timer = self._make_timer(self._strategy, self._module, self._config, timing)
        scale = Scale(job, few, start.micro_batches)
        try:
            found = self._search(layouts, start, timer, (scale, progress))
        except PlanError as error:  # of the model of a few layers: alike on all ranks
            return Tried(layout=start.layout, lines=(f"no layouts were tried on real steps: {error}",))
        return self._told(found, layouts)

    def _agree(self, wish: bool) -> bool:
        """Rank 0's."""
        return bool(self._strategy.broadcast(wish, 0))

    def _search(
        self, layouts: dict[Point, Layout], start: Candidate, timer: Timer, helpers: tuple[Scale, Progress]
    ) -> Found | None:
        """Rank 0's search; on the others what it asks for, until it is over."""
        (scale, progress), broadcast = helpers, self._strategy.broadcast
        if self._strategy.global_rank != 0:
            while (point := broadcast(None, 0)) is not None:
                timer.seconds(layouts[point])
            return None
        search = Search(trials=self._config.planning.trials, tolerance=self._config.planning.tolerance, repetitions=1)
        longest, count = 0.0, 0

        def measure(point: Point) -> float:
            nonlocal longest, count
            count += 1
            layout, began = layouts[broadcast(point, 0)], time.perf_counter()
            progress(f"{layout.describe()} on real steps", 0.5 + 0.5 * count / (search.trials + 1))
            seconds = timer.seconds(layout) * scale(layout) / layout.attention
            longest = max(longest, time.perf_counter() - began)
            return seconds

        def allowed(point: Point) -> bool:
            return point in layouts and time.perf_counter() + longest < self._deadline

        found = local_search(point_of(start.layout), allowed, measure, search)
        broadcast(None, 0)
        return found

    def _told(self, found: Found | None, layouts: dict[Point, Layout]) -> Tried:
        tried = None
        if found is not None:
            times = (f"{layouts[p].describe()} {seconds:.3g} s" for p, seconds in found.measured.items())
            line = f"tried on steps of a few layers, predicted time of a step per replica: {', '.join(times)}"
            tried = Tried(layout=layouts[found.point], lines=(line,))
        told = self._strategy.broadcast(tried, 0)
        assert isinstance(told, Tried)
        return told


class Scale:
    """How much longer a step of the whole model takes than one of a few layers, as far as costs are known."""

    def __init__(self, job: Replicas, few: Replicas, micro_batches: int) -> None:
        self._job, self._few, self._micro_batches = job, few, micro_batches

    def __call__(self, layout: Layout) -> float:
        whole, few = (predicted_seconds(job, layout, self._micro_batches) for job in (self._job, self._few))
        return whole / few


def point_of(layout: Layout) -> Point:
    """The sizes that are searched: with all ranks used, they say the number of groups."""
    return layout.attention, layout.ffn


def possible(job: Replicas) -> tuple[Layout, ...]:
    """Layouts in which each rank has an expert, and each group a layer."""
    moe: Any = job.request.model.moe
    experts = min(layer.experts for layer in moe)
    return tuple(layout for layout in job.layouts if layout.ffn <= experts and layout.depth <= len(moe))


def with_few_layers(job: Replicas, most: int) -> Replicas:
    """The same job for a model of some MoE layers."""
    model = job.request.model
    layers = tuple(layer for layer in model.layers if layer.experts is not None)[:most]
    return replace(job, request=replace(job.request, model=replace(model, layers=layers)))
