"""All layouts worth a thought, by the formula: the best few of them, each with its best way to run a step.

Ranks that don't make any share smaller are left out, and layouts are looked at in the order of what their computation
or their NICs alone take, until that is more than the time of the last of the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_afd.allocate.division import attention_sizes, ffn_sizes
from lightning_afd.allocate.fit import PENDING, Fitting, Footprint, held, run_length
from lightning_afd.allocate.formula import Stages, exposed_all_reduce, formula_seconds
from lightning_afd.allocate.request import RUNGS, Candidate, Request, Rung
from lightning_afd.allocate.simulated import Ordering, pass_seconds
from lightning_afd.cost.compute import expert_seconds, segment_seconds
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.cost.transfers import least_nic_seconds
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.schedule.shape import Shape


def best_candidates(request: Request, most: int = 10) -> list[Candidate]:
    """The fastest layouts by the formula, fastest first; raises PlanError where none fits into memory."""
    found: list[Candidate] = []
    fitting = Fitting(request)
    for least in sorted(_layouts(request), key=lambda least: (least.seconds, least.layout.world)):
        worst = found[most - 1].seconds if len(found) >= most else math.inf
        if least.seconds > worst:
            break
        if not fitting.hopeless(least.layout):
            tried = ways(request, fitting, least.layout, limit=Limit(seconds=worst, way=least.way))
            found += sorted(tried, key=lambda candidate: candidate.sort_key)[:1]
            found.sort(key=lambda candidate: candidate.sort_key)
    if not found:
        raise PlanError(_nothing_fits(request, fitting))
    return found[:most]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a way has to be faster than to be of interest."""

    seconds: float = math.inf
    way: float = 0.0
    """Of a pass at least."""

    def allows(self, run: _Run) -> bool:
        """Whether a step may be quick enough with so many passes."""
        return run.passes * self.way <= self.seconds

    def excludes(self, stages: Stages, micro_batches: int) -> bool:
        """Whether the busiest worker or link alone takes longer; with more recomputation it does so all the more."""
        return micro_batches * stages.rounds * stages.busy > self.seconds


NO_LIMIT = Limit()


def ways(
    request: Request, fitting: Fitting, layout: Layout, *, order: str = "af-pipe", limit: Limit = NO_LIMIT
) -> Iterator[Candidate]:
    """Ways to run a step on a layout: for each amount of recomputation and length of runs the fewest passes that fit.

    Micro-batches in flight are bounded by memory; a pass of fewer of them fills and drains the pipeline more often.
    """
    for rung in request.rungs:
        sides = fitting.sides(layout, rung)
        possible = [run for run in _runs(request, fitting, layout, order) if _bytes(run, sides) <= fitting.limit]
        fewest = {run.group: run for run in reversed(possible) if limit.allows(run)}
        if fewest:
            costs = step_costs(request.job(layout, 1, rung))
            stages = Stages.of(costs)
            if limit.excludes(stages, request.per_replica(layout.attention)):
                return
            for run in fewest.values():
                yield _candidate(run, rung, (costs, stages), _bytes(run, sides))
        if any(run.passes == 1 and run.group == 4 * layout.depth for run in possible):
            return  # more recomputation has nothing to give


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Passes, and how long their runs are."""

    layout: Layout
    shape: Shape
    passes: int
    order: str
    group: int


def simulated(request: Request, candidate: Candidate) -> Candidate:
    """The candidate with the simulator's step time."""
    job = request.job(candidate.layout, candidate.micro_batches, candidate.rung)
    costs = step_costs(job)
    seconds = pass_seconds(job, Ordering(order=candidate.order, group=candidate.group))
    run = run_length(2 * candidate.layout.depth, candidate.micro_batches, candidate.group)
    update = exposed_all_reduce(costs, Stages.of(costs), run) + costs.update.optimizer_seconds
    return replace(candidate, simulated_seconds=candidate.passes * seconds + update)


def _candidate(run: _Run, rung: Rung, cost: tuple[StepCosts, Stages], nbytes: float) -> Candidate:
    (costs, stages), micro_batches = cost, run.shape.micro_batches
    length = run_length(2 * run.layout.depth, micro_batches, run.group)
    update = exposed_all_reduce(costs, stages, length) + costs.update.optimizer_seconds
    return Candidate(
        layout=run.layout,
        order=run.order,
        group=run.group,
        micro_batches=micro_batches,
        passes=run.passes,
        recompute=rung[0],
        recompute_experts=rung[1],
        formula_seconds=run.passes * formula_seconds(stages, micro_batches, run.group) + update,
        bound_seconds=run.passes * micro_batches * stages.rounds * stages.busy,
        memory_bytes=nbytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Least:
    """What computation or NICs alone take on a layout, without any recomputation."""

    layout: Layout
    seconds: float
    """Of a step: the busiest of both roles and their NICs."""
    way: float
    """Of one micro-batch through all layers and back: a pass takes at least so long."""


def _layouts(request: Request) -> Iterator[_Least]:
    experts = min(layer.experts for layer in request.model.moe)
    narrowest = next(layer for layer in request.model.moe if layer.experts == experts)
    attention = _attention_seconds(request)
    for layout in request.layouts or _useful_layouts(request, experts):
        rounds = -(-len(request.model.moe) // layout.depth)
        job = request.job(layout, 1, RUNGS[0])
        ffn = expert_seconds(job, narrowest)
        layer = max(sum(ffn.values()), least_nic_seconds(job, narrowest))
        yield _Least(
            layout=layout,
            seconds=request.per_replica(layout.attention) * max(attention / layout.depth, layer * rounds),
            way=attention + len(request.model.moe) * (ffn["f"] + ffn["b"]),
        )


def _useful_layouts(request: Request, experts: int) -> Iterator[Layout]:
    """Those of which each rank makes a share smaller."""
    devices = request.cluster.devices
    for groups in request.groups:
        if 2 * groups > devices or groups > len(request.model.moe):
            continue
        most = devices // groups - 1
        for a in attention_sizes(request.parts, most):
            for f in ffn_sizes(experts, most + 1 - a.ranks):
                yield Layout(attention=a.ranks, ffn=f.ranks, groups=groups)


def _attention_seconds(request: Request) -> float:
    """Of one micro-batch, all segments of the MoE layers, without anything to pack."""
    job = request.job(Layout(attention=1, ffn=1), 1, RUNGS[0])
    known = {segment: sum(segment_seconds(job, segment, 0.0).values()) for segment in set(job.model.segments[:-1])}
    return sum(known[segment] for segment in job.model.segments[:-1])


def _runs(request: Request, fitting: Fitting, layout: Layout, order: str) -> Iterator[_Run]:
    all_of_them, workers = request.per_replica(layout.attention), 2 * layout.depth
    seen: set[int] = set()
    for passes in range(1, all_of_them + 1):
        micro_batches = -(-all_of_them // passes)
        if micro_batches in seen:
            continue
        seen.add(micro_batches)
        shape = fitting.shape(layout, micro_batches)
        for group in (workers, 3 * workers // 2, 2 * workers) if micro_batches > workers else (2 * workers,):
            yield _Run(layout=layout, shape=shape, passes=passes, order=order, group=group)


def _bytes(run: _Run, sides: tuple[Footprint, Footprint]) -> float:
    """Of the fullest rank."""
    in_flight = held(run.shape, run.order, run.group)
    attention, ffn = (side.total(n, run.shape.micro_batches) for side, n in zip(sides, in_flight, strict=True))
    late = PENDING * sides[1].once if run.order == "zero-bubble" else 0.0  # a weight gradient keeps more than a forward
    return max(attention, ffn + late)


def _nothing_fits(request: Request, fitting: Fitting) -> str:
    """The layout that lacks least, and what of."""
    needed, layout, what = min(_least(request, fitting), key=lambda entry: entry[0])
    (recompute, experts), device = request.rungs[-1], request.cluster.device
    return (
        f"no layout on {request.cluster.devices} x {device.name} fits into memory: the nearest one, "
        f"{layout.describe()} with recompute={recompute}{' and recompute_experts=true' if experts else ''}, needs "
        f"{needed / 1e9:.1f} GB on {what} of {device.memory_bytes / 1e9:.1f} GB that are usable. Use more nodes, "
        "devices with more memory, fewer or shorter rows per micro-batch, precision=bf16-true or "
        "optimizer_sharding=torch"
    )


def _least(request: Request, fitting: Fitting) -> Iterator[tuple[float, Layout, str]]:
    """Of each layout the least memory: one micro-batch at a time, everything computed again."""
    for layout in (least.layout for least in _layouts(request)):
        if 2 * layout.world <= request.cluster.devices:
            continue  # a layout of more ranks needs less on each
        counts = held(fitting.shape(layout, 1), "af-pipe", 2 * layout.depth)
        sides = zip(fitting.sides(layout, request.rungs[-1]), counts, strict=True)
        fullest, count = max(sides, key=lambda entry: entry[0].total(entry[1], 1))
        side = "an attention rank" if fullest.role == "A" else "an FFN rank"
        yield fullest.total(count, 1), layout, f"{side} ({fullest.describe(count, 1)})"
