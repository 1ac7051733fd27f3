"""From a request to a plan: the formula picks ten layouts, the simulator ranks them, the verdict compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lightning_afd.allocate.candidates import best_candidates, simulated, ways
from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.allocate.collocated import Predict, baselines
from lightning_afd.allocate.division import Division, Needs, Size, Split, attention_sizes, ffn_sizes
from lightning_afd.allocate.fit import Fitting
from lightning_afd.allocate.milp import Solver, solve
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.allocate.verdict import judge
from lightning_afd.cost.times import step_costs
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How thoroughly to look."""

    layouts: int = 10
    """That are simulated, if the formula is not more than `slack` times that of the best one."""
    slack: float = 1.25
    """Far beyond what the formula is wrong by."""
    refined: int = 4
    """Of these, how many are simulated with all orders, the longest runs that fit, and other ranks in a node; the best
    one with all runs."""
    solver: Solver = "auto"
    """Of the linear program."""
    predict: Mapping[str, Predict] = field(default_factory=baselines)
    """Collocated layouts to compare with."""


def choose(request: Request, effort: Effort) -> PlanChoice:
    """The best plan; raises PlanError where nothing fits into memory."""
    found = best_candidates(request, effort.layouts)
    near = [c for c in found if c.formula_seconds <= effort.slack * found[0].formula_seconds]
    ranked = sorted((simulated(request, candidate) for candidate in near), key=_key)
    far = found[len(near) :]
    for candidate in ranked[: effort.refined]:
        for placed in _placements(request, candidate):
            ranked += [simulated(request, way) for way in _others(request, placed, ranked, longest=True)]
    ranked.sort(key=_key)
    ranked += [simulated(request, way) for way in _others(request, ranked[0], ranked, longest=False)]
    candidates = (*sorted(ranked, key=_key), *far)
    best = candidates[0]
    predictions = [found for found in (predict(request) for predict in effort.predict.values()) if found is not None]
    ports, choices = request.cluster.ports, request.choices
    return PlanChoice(
        best=best,
        attention_nics=ports * choices.attention_nics,
        ffn_nics=ports * choices.ffn_nics,
        utilisation=_utilisation(request, best),
        division=_division(request, best, effort.solver),
        candidates=candidates,
        verdict=judge(request, best, predictions),
        model=request.model.describe(),
        options=choices.options,
    )


def _key(candidate: Candidate) -> tuple[float, ...]:
    return candidate.sort_key


def _others(request: Request, candidate: Candidate, known: list[Candidate], *, longest: bool) -> list[Candidate]:
    """Orders and runs on its layout, as much recomputed, that are not known yet."""
    fitting, seen = Fitting(request), {_way(other) for other in known}
    found = []
    for order in request.orders:
        tried = [way for way in ways(request, fitting, candidate.layout, order=order) if way.rung == candidate.rung]
        tried.sort(key=lambda way: (way.passes, -way.group))
        found += tried[:1] if longest else tried
    return [way for way in found if _way(way) not in seen]


def _placements(request: Request, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate, and the same with other ranks in a node; nothing changes where all of them are in one."""
    layout = candidate.layout
    yield candidate
    if layout.world > request.cluster.devices_per_node:
        others = (replace(layout, neighbours=way) for way in request.neighbours if way != layout.neighbours)
        yield from (replace(candidate, layout=other) for other in others)


def _way(candidate: Candidate) -> tuple[object, ...]:
    return candidate.layout, candidate.order, candidate.group, candidate.micro_batches, candidate.rung


def _utilisation(request: Request, best: Candidate) -> float:
    peak = request.cluster.device.peak(request.choices.precision.compute)
    flops = request.parts * request.model.step_flops(request.batch.lengths)
    return flops / (best.seconds * best.layout.world * peak)


def division_of(request: Request, at: Candidate) -> Division:
    """One group's ranks and NICs as a question to the linear program, at the costs of a given layout.

    Work is taken to be divisible: what it costs on another number of ranks follows from the lists of sizes.
    """
    layout, cluster = at.layout, request.cluster
    ranks = cluster.devices // layout.depth
    busy = step_costs(request.job(layout, 1, at.rung)).busy()
    sides = {role: [worker for who, worker in busy.items() if who.role == role] for role in "AF"}
    experts = min(layer.experts for layer in request.model.moe)
    compute = {role: max(worker.compute for worker in workers) for role, workers in sides.items()}
    links = {role: max(max(w.send, w.receive) for w in workers) for role, workers in sides.items()}
    nics = int(ranks * cluster.ports)
    per_step = request.per_replica(layout.attention)
    return Division(
        needs=Needs(
            attention=compute["A"] * request.parts,
            ffn=compute["F"] * per_step * experts / -(-experts // layout.ffn),
            attention_nic=links["A"] * per_step * layout.attention * cluster.ports,
            ffn_nic=links["F"] * per_step * layout.ffn * cluster.ports,
        ),
        attention=attention_sizes(request.parts, ranks - 1),
        ffn=_sizes_that_fit(request, layout, ffn_sizes(experts, ranks - 1)),
        ranks=ranks,
        nics=nics,
        nics_per_rank=int(cluster.ports),
    )


def _sizes_that_fit(request: Request, layout: Layout, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """FFN sizes whose ranks hold their experts, each with the most attention ranks whose rows fit as well."""
    fitting = Fitting(request)
    found = []
    for size in sizes:
        fits = [
            a.ranks
            for a in attention_sizes(request.parts, request.cluster.devices // layout.depth - size.ranks)
            if not fitting.hopeless(replace(layout, attention=a.ranks, ffn=size.ranks))
        ]
        if fits:
            found.append(replace(size, most_attention=max(fits)))
    return tuple(found)


def _division(request: Request, best: Candidate, solver: Solver) -> Split | None:
    if request.cluster.ports < 1 or request.cluster.devices // best.layout.depth < 2:
        return None
    try:
        return solve(division_of(request, best), solver)
    except PlanError:
        return None
