"""Step times of a job by the simulator.

A step of many layers and micro-batches is periodic, so that its time is linear in the rounds of the ring for a given
number of runs, and linear in the runs: long steps are simulated short, at the corners, and extrapolated (within 1 % of
the whole simulation at the depth of published models, within 5 % for shallow ones). What the all-reduce of gradients
adds is not linear, and comes from a formula.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import Job
from lightning_afd.cost.model import LayerShape
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.actions import Action, Op
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import Knobs, build
from lightning_afd.simulate import Link, Load, Simulation, simulate
from lightning_afd.timeline import Timeline

ROUNDS = (2, 4)
"""Rounds of the ring at which long steps are simulated: even numbers, as windows may alternate."""
RUNS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """An order of the schedule and the longest run of micro-batches in it."""

    order: str
    group: int

    def runs(self, micro_batches: int) -> int:
        """Runs of a pass."""
        return -(-micro_batches // self.group)


def simulated_pass(job: Job, ordering: Ordering, *, reduces: bool = True) -> Simulation:
    """One pass through the pipeline with forward and backward; `reduces`: dense gradients are summed in it."""
    costs = step_costs(job)
    knobs = Knobs(group=ordering.group, pace=_pace(costs))
    return simulate(build(ordering.order, job.shape, knobs), load_of(costs, reduces=reduces))


def pass_seconds(job: Job, ordering: Ordering) -> float:
    """Seconds of a pass without the all-reduce of gradients, extrapolated where it is long."""
    rounds = -(-len(job.model.moe) // job.layout.depth)
    runs = ordering.runs(job.micro_batches)
    at_rounds = ROUNDS if rounds > ROUNDS[-1] else (rounds,)
    at_runs = RUNS if runs > RUNS[-1] else (runs,)
    seconds = []
    for count in at_runs:
        part = replace(job, micro_batches=-(-job.micro_batches * count // runs))
        points = [(r, _seconds(shorter(part, r), ordering)) for r in at_rounds]
        seconds.append((count, _line(points, rounds)))
    return _line(seconds, runs)


def shared_seconds(timeline: Timeline, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a simulated step whose ranks share the cores of their nodes, each with an equal part of them.

    While more ranks of a node compute than it can serve at full speed, everything is slower by the same factor, so that
    the step is the simulated one, stretched in such places.
    """
    if math.isinf(cluster.at_once):
        return timeline.end
    changes: list[tuple[float, int, Worker]] = []
    for span in timeline.spans:
        if timeline.lane(span) == "compute":
            changes += [(span.start, 1, timeline.worker(span)), (span.end, -1, timeline.worker(span))]
    active, seconds, before = Counter[int](), 0.0, 0.0
    for time, sign, worker in sorted(changes):
        seconds += (time - before) * max(1.0, max(active.values(), default=0) / cluster.at_once)
        for rank in layout.ranks_of(worker):
            active[cluster.node_of(rank)] += sign
        before = time
    return seconds + timeline.end - before


def _seconds(job: Job, ordering: Ordering) -> float:
    timeline = simulated_pass(job, ordering, reduces=False).timeline
    return shared_seconds(timeline, job.layout, job.cluster)


def shorter(job: Job, rounds: int) -> Job:
    """The job with so many rounds of the ring only; dense layers at the start stay."""
    wanted, layers = rounds * job.layout.depth, list[LayerShape]()
    for layer in job.model.layers:
        if wanted and layer.experts is not None:
            wanted -= 1
        elif not wanted:
            break
        layers.append(layer)
    return replace(job, model=replace(job.model, layers=tuple(layers)))


def load_of(costs: StepCosts, *, reduces: bool = True) -> Load:
    """The costs as the simulator takes them.

    A transfer's bytes are the seconds for which it occupies the links of an A rank, at one per second; those of an F
    rank are slower or faster by the ratio of both, which a layer's transfers share.
    """
    shape, share = costs.shape, costs.update.all_reduce_seconds
    dispatch = costs.actions["D", 0, "f"]
    ratio = dispatch.send_seconds / dispatch.receive_seconds if dispatch.receive_seconds else 1.0
    segments = -(-shape.layers // shape.depth)

    def size(action: Action) -> float:
        cost = costs.of(action)
        return cost.receive_seconds if action.op != "H" and _from_ffn(costs, action) else cost.send_seconds

    def link(op: Op) -> Link:
        found = [cost for (key, _, _), cost in costs.actions.items() if key == op]
        return Link(attention=1.0, ffn=ratio or 1.0, latency=max((cost.latency for cost in found), default=0.0))

    def reduce(worker: Worker, layer: int) -> float:
        return share / segments if reduces and worker.role == "A" and layer < shape.layers else 0.0

    return Load(
        seconds=lambda action: costs.of(action).seconds,
        bytes=size,
        links={op: link(op) for op in ("D", "C", "H", "L")},
        reduce=reduce,
    )


def _from_ffn(costs: StepCosts, action: Action) -> bool:
    return costs.shape.endpoints(action)[0].role == "F"


def _pace(costs: StepCosts) -> Pace:
    """Mean durations, for orders that fill gaps."""
    kinds: dict[str, list[float]] = {}
    for (op, layer, phase), cost in costs.actions.items():
        kinds.setdefault(("T" if op == "A" and layer == costs.shape.layers else op) + phase, []).append(cost.seconds)
    means = {kind: sum(values) / len(values) for kind, values in kinds.items()}
    seconds = {kind: means.get(kind, 0.0) for kind in ("Af", "Ab", "Aw", "Ef", "Eb", "Ew", "Tf", "Tb", "Tw")}
    return Pace(seconds=seconds, transfer=means["Df"])


def _line(points: list[tuple[int, float]], at: int) -> float:
    """The value of the line through one or two points."""
    (x, y), *rest = points
    if not rest:
        return y
    ((other, value),) = rest
    return y + (value - y) * (at - x) / (other - x)
