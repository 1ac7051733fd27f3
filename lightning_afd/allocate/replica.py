"""Plans where each data replica brings a batch of its own, as in a Trainer.

More replicas make a step larger there, and the batch says how large a micro-batch is. So ways to run a step are
compared by what a row takes, and the verdict compares with the one collocated layout that the strategy has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_afd.allocate.candidates import simulated, ways
from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.allocate.choose import Effort, choose
from lightning_afd.allocate.collocated import Prediction
from lightning_afd.allocate.fit import Fitting
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.baselines.collocated import Collocated, Costs
from lightning_afd.baselines.stages import Stages
from lightning_afd.cost.job import BatchShape
from lightning_afd.cost.memory import scheduled_activations
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.schedule.programs import programs_of
from lightning_afd.schedule.shape import Schedule
from lightning_afd.simulate import simulate


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """A job of ranks that are all used, in one of some layouts."""

    request: Request
    """Model, cluster, choices, recomputation and orders; its batch and number of parts are replaced."""
    rows: int
    """Sequences in a batch of each replica."""
    length: int
    """Tokens of a sequence."""
    layouts: tuple[Layout, ...]
    micro_batches: tuple[int, ...]
    """Numbers of parts that a batch may be cut into."""

    def at(self, layout: Layout, micro_batches: int) -> Request:
        """The request of one way to run a step: one pass of `micro_batches` per replica."""
        return replace(
            self.request,
            batch=BatchShape.rows(-(-self.rows // micro_batches), self.length),
            parts=layout.attention * micro_batches,
            groups=(layout.depth,),
            layouts=(layout,),
        )

    def only(self, layout: Layout, micro_batches: int) -> Replicas:
        """The same job in this layout alone, with these ranks in a node and so many micro-batches."""
        request = replace(self.request, neighbours=(layout.neighbours,))
        return replace(self, request=request, layouts=(layout,), micro_batches=(micro_batches,))


def cuts(rows: int, most: int = 16) -> tuple[int, ...]:
    """Numbers of micro-batches that are worth a thought: equal parts of so many rows, 16 at most."""
    return tuple(parts for parts in range(1, min(rows, most) + 1) if rows % parts == 0)


def choose_for_replicas(job: Replicas, effort: Effort) -> PlanChoice:
    """The plan with the least predicted time per row; raises PlanError where nothing fits into memory.

    Its seconds are those of its own step. Collocated layouts are given as long as they take for as many rows.
    """
    best = min((simulated(job.at(c.layout, c.micro_batches), c) for c in _likely(job, effort.layouts)), key=per_row)
    request = job.at(best.layout, best.passes * best.micro_batches)
    return choose(request, replace(effort, predict={"collocated": lambda asked: _collocated(job, asked)}))


def predicted_seconds(job: Replicas, layout: Layout, micro_batches: int) -> float:
    """A step on a layout in the simulator, in the way that the formula likes best; raises PlanError without one."""
    request = job.at(layout, micro_batches)
    likely = sorted(ways(request, Fitting(request), layout), key=per_row)
    if not likely:
        raise PlanError(f"{layout.describe()} with {micro_batches} micro-batches does not fit into memory")
    return simulated(request, likely[0]).seconds


def per_row(candidate: Candidate) -> tuple[float, ...]:
    """What sorts candidates: time over replicas, as each has as many rows."""
    return candidate.seconds / candidate.layout.attention, *candidate.sort_key


def _likely(job: Replicas, most: int) -> list[Candidate]:
    """The best by the formula: each layout with the numbers of micro-batches that fit in one pass, if any does."""
    found = [candidate for layout in job.layouts for candidate in _ways(job, layout)]
    if not found:
        raise PlanError(_nothing(job))
    whole = [candidate for candidate in found if candidate.passes == 1]
    return sorted(whole or found, key=per_row)[:most]


def _ways(job: Replicas, layout: Layout) -> Iterator[Candidate]:
    experts = min((layer.experts for layer in job.request.model.moe), default=0)
    if layout.ffn > experts or layout.depth > len(job.request.model.moe):
        return
    for micro_batches in job.micro_batches:
        request = job.at(layout, micro_batches)
        fitting = Fitting(request)
        if not fitting.hopeless(layout):
            yield from ways(request, fitting, layout)


def _nothing(job: Replicas) -> str:
    device = job.request.cluster.device
    return (
        f"none of {len(job.layouts)} layouts of {job.request.cluster.devices} x {device.name} fits into the "
        f"{device.memory_bytes / 1e9:.1f} GB of each, or all have more FFN ranks than experts or more groups than MoE "
        "layers"
    )


def _collocated(job: Replicas, asked: Request) -> Prediction | None:
    """The fastest step of the collocated layout, scaled to the rows of a step of the request."""
    ranks = asked.cluster.devices
    if ranks > min(layer.experts for layer in asked.model.moe):
        return None
    share = asked.layouts[0].attention / ranks
    tried = (_with_least_recomputation(job.at(Layout.together(ranks), count), count) for count in job.micro_batches)
    found = [replace(each, seconds=each.seconds * share) for each in tried if each is not None]
    return min(found, key=lambda prediction: prediction.seconds, default=None)


def _with_least_recomputation(request: Request, micro_batches: int) -> Prediction | None:
    """All ranks with attention and a share of the experts, in order flowmoe; None where it has no room."""
    ranks, layers = request.cluster.devices, len(request.model.moe)
    together, shape = Layout.together(ranks), Stages(layers=layers, groups=1, chunks=1, micro_batches=micro_batches)
    schedule = programs_of(together, "flowmoe", shape).schedule
    for rung in request.rungs:
        job = request.job(Layout(attention=1, ffn=1), micro_batches, rung)
        costs = Costs(job=job, layout=Collocated(data=ranks, experts=ranks), shape=shape)
        memory = costs.fixed_memory() + sum(
            scheduled_activations(costs.part, worker, program) for worker, program in schedule.programs.items()
        )
        if memory <= request.cluster.device.memory_bytes:
            return Prediction(
                name=f"collocated (flowmoe, micro_batches={micro_batches})",
                seconds=_step_seconds(costs, schedule),
                detail=f"experts over {ranks} ranks, {micro_batches} micro-batches, recompute={rung[0]}",
                memory_bytes=memory,
                micro_batches=micro_batches,
                recompute=rung[0],
                recompute_experts=rung[1],
            )
    return None


def _step_seconds(costs: Costs, schedule: Schedule) -> float:
    """With the sums of gradients as far as they show, and the update; that ranks share cores is in the costs."""
    return simulate(schedule, costs.load()).seconds + costs.update_seconds()
