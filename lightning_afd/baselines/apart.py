"""The other side of the comparison: separate attention and expert workers, with the same costs and links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal

from lightning_afd.baselines.collocated import free_transfers
from lightning_afd.baselines.loads import load_of, pace_of
from lightning_afd.cost.job import Job
from lightning_afd.cost.memory import memory_of, scheduled_activations
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.load import Load
from lightning_afd.placement import Layout
from lightning_afd.schedule.orders import Knobs, build
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.simulate import Simulation, simulate

GROUPS = (1, 2, 4, 8)
"""Groups per role that are tried."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """A job on a layout of A and F ranks, its order and its runs of micro-batches."""

    job: Job
    order: Literal["af-pipe", "zero-bubble"] = "af-pipe"
    run: int
    """Micro-batches that pass a round of the ring one behind the other (G)."""

    def describe(self) -> str:
        """`2 x (40A + 24F), R=13, G=8, af-pipe`."""
        found = f"{self.job.layout.describe()}, R={self.job.micro_batches}, G={self.run}, {self.order}"
        return found + (", recompute" if self.job.choices.recompute == "full" else "")

    @cached_property
    def costs(self) -> StepCosts:
        """Of all actions; weight gradients of attention are apart under zero-bubble."""
        return step_costs(_split(self.job) if self.order == "zero-bubble" else self.job)

    @property
    def shape(self) -> Shape:
        return replace(self.job.shape, split_attention=self.order == "zero-bubble")

    @cached_property
    def schedule(self) -> Schedule:
        """Of all workers."""
        return build(self.order, self.shape, Knobs(group=self.run, pace=pace_of(self.costs)))

    @cached_property
    def memory(self) -> float:
        """Bytes on the fullest rank."""
        job = _split(self.job) if self.order == "zero-bubble" else self.job
        return max(
            memory_of(job, worker, scheduled_activations(job, worker, program)).total
            for worker, program in self.schedule.programs.items()
        )

    @property
    def least_memory(self) -> float:
        """Bytes without activations."""
        return max(memory_of(self.job, worker, 0).total for worker in self.shape.workers())

    @property
    def fits(self) -> bool:
        limit = self.job.cluster.device.memory_bytes
        return self.least_memory <= limit and self.memory <= limit

    def load(self) -> Load:
        """For the simulator."""
        return load_of(self.costs)


def _split(job: Job) -> Job:
    return replace(job, choices=replace(job.choices, split_attention=True))


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A simulated step with separate workers."""

    division: Division
    simulation: Simulation
    seconds: float
    """Of the step, the optimizer's included."""

    @cached_property
    def exposed(self) -> float:
        """Share of the step that free transfers would save (0..1)."""
        free = simulate(self.division.schedule, free_transfers(self.division.load()))
        return (self.simulation.seconds - free.seconds) / self.seconds

    @property
    def busiest(self) -> str:
        """The lane that sets the bound, such as `A send`."""
        worker, _, way = max(self.simulation.busy, key=lambda lane: self.simulation.busy[lane])
        return f"{worker.role} {way}"


def run(division: Division) -> Apart:
    """Simulate a division."""
    simulation = simulate(division.schedule, division.load())
    seconds = simulation.seconds + division.costs.update.optimizer_seconds
    return Apart(division=division, simulation=simulation, seconds=seconds)


def steps_apart(job: Job, most: int = 2) -> dict[str, Apart]:
    """By order, the best of the `most` likely layouts, run lengths and recomputations for the job's cluster.

    Whole nodes go to each group, sequences of a step are those of the job. zero-bubble is tried on the layout that is
    best for af-pipe, if it fits. Where nothing fits into memory, the smallest is taken.
    """
    divisions = sorted(_divisions(job), key=_estimate)
    chosen = list(islice((division for division in divisions if division.fits), most))
    chosen = chosen or [min(divisions, key=lambda division: division.least_memory)]
    best = min((run(division) for division in chosen), key=lambda found: found.seconds)
    other = replace(best.division, order="zero-bubble")
    return {"af-pipe": best} | ({"zero-bubble": run(other)} if other.fits else {})


def best_apart(job: Job, most: int = 2) -> Apart:
    """The better of the two orders."""
    return min(steps_apart(job, most).values(), key=lambda found: found.seconds)


def _divisions(job: Job) -> Iterator[Division]:
    ranks, node, rows = job.cluster.devices, job.cluster.devices_per_node, job.layout.attention * job.micro_batches
    most = min(layer.experts for layer in job.model.moe)
    for groups in (groups for groups in GROUPS if ranks // groups >= 2 * node and groups <= len(job.model.moe)):
        each = ranks // groups
        for ffn in range(node, min(each - node, most) + 1, node):
            layout = Layout(attention=each - ffn, ffn=ffn, groups=groups)
            for recompute in ("none", "full"):
                choices = replace(job.choices, recompute=recompute)
                made = replace(job, layout=layout, micro_batches=-(-rows // layout.attention), choices=choices)
                yield from (Division(job=made, run=run) for run in (2 * groups, 4 * groups))


def _estimate(division: Division) -> float:
    """About the seconds of a step: the busiest lane and the warm-up, which short runs make longer by transfers."""
    costs, groups = division.costs, division.shape.depth
    layer = division.shape.layers // 2
    stages = sum(cost.seconds for (op, own, _), cost in costs.actions.items() if own == layer and op in "AE")
    transfer = costs.actions["D", layer, "f"].seconds
    rounds = division.job.micro_batches * -(-division.shape.layers // groups) / division.run
    shown = (2 * transfer * rounds if division.run == 2 * groups else 0) + 2 * (2 * groups - 1) * transfer
    return costs.bound() + (2 * groups - 1) * stages / 2 + shown
