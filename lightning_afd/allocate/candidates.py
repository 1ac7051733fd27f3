"""All layouts worth a thought, by the formula: the best few of them, each with its best way to run a step.

Ranks that don't make any share smaller are left out, and layouts are looked at in the order of what their computation
alone takes, until that is more than the time of the last of the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_afd.allocate.division import attention_sizes, ffn_sizes
from lightning_afd.allocate.fit import Footprint, footprints, held, run_length
from lightning_afd.allocate.formula import Stages, exposed_all_reduce, formula_seconds
from lightning_afd.allocate.request import Candidate, Recompute, Request
from lightning_afd.allocate.simulated import Ordering, pass_seconds
from lightning_afd.cost.compute import expert_seconds, segment_seconds
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.schedule.shape import Shape


def best_candidates(request: Request, most: int = 10) -> list[Candidate]:
    """The fastest layouts by the formula, fastest first; raises PlanError where none fits into memory."""
    found: list[Candidate] = []
    for lower, layout in sorted(_layouts(request), key=lambda entry: (entry[0], entry[1].world)):
        if len(found) >= most and lower > found[most - 1].seconds:
            break
        found += sorted(ways(request, layout), key=lambda candidate: candidate.sort_key)[:1]
        found.sort(key=lambda candidate: candidate.sort_key)
    if not found:
        raise PlanError(_nothing_fits(request))
    return found[:most]


def ways(request: Request, layout: Layout, orders: tuple[str, ...] = ("af-pipe",)) -> Iterator[Candidate]:
    """Every way to run a step on a layout that fits into memory: passes, runs, recomputation, orders."""
    for rung in request.rungs:
        sides = footprints(request, layout, rung)
        possible = [run for run in _runs(request, layout, orders) if _bytes(run, sides) <= _limit(request)]
        if possible:
            costs = step_costs(request.job(layout, 1, rung))
            stages = Stages.of(costs)
            for run in possible:
                yield _candidate(run, rung, (costs, stages), _bytes(run, sides))
        if any(run.passes == 1 and run.group == 4 * layout.groups for run in possible):
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
    run = run_length(2 * candidate.layout.groups, candidate.micro_batches, candidate.group)
    update = exposed_all_reduce(costs, Stages.of(costs), run) + costs.update.optimizer_seconds
    return replace(candidate, simulated_seconds=candidate.passes * seconds + update)


def _candidate(
    run: _Run, rung: tuple[Recompute, bool], cost: tuple[StepCosts, Stages], nbytes: float
) -> Candidate:
    (costs, stages), micro_batches = cost, run.shape.micro_batches
    length = run_length(2 * run.layout.groups, micro_batches, run.group)
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


def _layouts(request: Request) -> Iterator[tuple[float, Layout]]:
    """Layouts, each with what its computation alone takes per step at least."""
    model, devices = request.model, request.cluster.devices
    experts = min(layer.experts for layer in model.moe)
    widest = next(layer for layer in model.moe if layer.experts == experts)
    for groups in request.groups:
        if 2 * groups > devices or groups > len(model.moe):
            continue
        most, rounds = devices // groups - 1, -(-len(model.moe) // groups)
        attention = _attention_seconds(request) / groups
        for a in attention_sizes(request.parts, most):
            for f in ffn_sizes(experts, most + 1 - a.ranks):
                layout = Layout(attention=a.ranks, ffn=f.ranks, groups=groups)
                ffn = sum(expert_seconds(request.job(layout, 1, ("none", False)), widest).values()) * rounds
                yield request.per_replica(a.ranks) * max(attention, ffn), layout


def _attention_seconds(request: Request) -> float:
    """Of one micro-batch, all segments of the MoE layers, without anything to pack."""
    job = request.job(Layout(attention=1, ffn=1), 1, ("none", False))
    known = {segment: sum(segment_seconds(job, segment, 0.0).values()) for segment in set(job.model.segments[:-1])}
    return sum(known[segment] for segment in job.model.segments[:-1])


def _runs(request: Request, layout: Layout, orders: tuple[str, ...]) -> Iterator[_Run]:
    all_of_them, workers = request.per_replica(layout.attention), 2 * layout.groups
    seen: set[int] = set()
    for passes in range(1, all_of_them + 1):
        micro_batches = -(-all_of_them // passes)
        if micro_batches in seen:
            continue
        seen.add(micro_batches)
        shape = Shape(layers=len(request.model.moe), groups=layout.groups, micro_batches=micro_batches)
        groups = (workers, 3 * workers // 2, 2 * workers) if micro_batches > workers else (2 * workers,)
        for order in orders:
            for group in groups:
                yield _Run(layout=layout, shape=shape, passes=passes, order=order, group=group)


def _bytes(run: _Run, sides: tuple[Footprint, Footprint]) -> float:
    """Of the fullest rank."""
    in_flight = held(run.shape, run.order, run.group)
    return max(side.total(n, run.shape.micro_batches) for side, n in zip(sides, in_flight, strict=True))


def _limit(request: Request) -> float:
    return request.cluster.device.memory_bytes


def _nothing_fits(request: Request) -> str:
    """The layout that lacks least, and what of."""
    nearest = min(_least(request), key=lambda entry: entry[0])
    needed, layout, (recompute, experts), what = nearest
    device = request.cluster.device
    return (
        f"no layout on {request.cluster.devices} x {device.name} fits into memory: the nearest one, "
        f"{layout.describe()} with recompute={recompute}{' and recompute_experts=true' if experts else ''}, needs "
        f"{needed / 1e9:.1f} GB ({what}) of {device.memory_bytes / 1e9:.1f} GB that are usable. Use more nodes, devices "
        "with more memory, shorter or fewer rows per micro-batch, precision=bf16-true or optimizer_sharding=torch"
    )


def _least(request: Request) -> Iterator[tuple[float, Layout, tuple[Recompute, bool], str]]:
    """Of each layout the least memory: one micro-batch at a time, everything computed again."""
    rung = request.rungs[-1]
    for _, layout in _layouts(request):
        sides = footprints(request, layout, rung)
        shape = Shape(layers=len(request.model.moe), groups=layout.groups, micro_batches=1)
        counts = held(shape, "af-pipe", 2 * layout.groups)
        fullest, count = max(zip(sides, counts, strict=True), key=lambda entry: entry[0].total(entry[1], 1))
        side = "an attention rank" if fullest.role == "A" else "an FFN rank"
        yield fullest.total(count, 1), layout, rung, f"{side}: {fullest.describe(count, 1)}"
