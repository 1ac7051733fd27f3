"""The costs of a step with separate workers as the simulator and the orders take them."""

from __future__ import annotations

from lightning_afd.cost.times import StepCosts
from lightning_afd.cost.transfers import ActionCost
from lightning_afd.load import Link, Load
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action, Op
from lightning_afd.schedule.fill import Pace


def load_of(costs: StepCosts, *, reduces: bool = True) -> Load:
    """The costs for the simulator; `reduces`: dense gradients are summed in the step.

    A transfer's bytes are the seconds for which it occupies the links of an A rank, at one per second; those of an F
    rank are slower or faster by the ratio of both, which a layer's transfers share. Hops and logits share the links of
    dispatch and combine where both leave the node, or both stay in it.
    """

    def size(action: Action) -> float:
        cost = costs.of(action)
        return cost.receive_seconds if action.op == "C" else cost.send_seconds

    def reduce(worker: Worker, segment: int) -> float:
        return costs.reduces[segment] if reduces and worker.role == "A" else 0.0

    return Load(seconds=lambda action: costs.of(action).seconds, bytes=size, links=_links(costs), reduce=reduce)


def _links(costs: StepCosts) -> dict[Op, Link]:
    found: dict[Op, ActionCost] = {}
    for kind in costs.alike:
        for op, _, cost in kind.costs:
            if op in "DCHL" and (op not in found or cost.latency > found[op].latency):
                found[op] = cost
    dispatch = found["D"]
    ratio = dispatch.send_seconds / dispatch.receive_seconds if dispatch.receive_seconds else 1.0
    shared = Link(attention=1.0, ffn=ratio or 1.0, latency=dispatch.latency)
    return {
        op: shared if cost.over_nic == dispatch.over_nic else Link(attention=1.0, ffn=1.0, latency=cost.latency)
        for op, cost in found.items()
    }


def pace_of(costs: StepCosts) -> Pace:
    """Mean durations, for orders that fill gaps."""
    kinds: dict[str, list[float]] = {}
    for (op, layer, phase), cost in costs.actions.items():
        kinds.setdefault(("T" if op == "A" and layer == costs.shape.layers else op) + phase, []).append(cost.seconds)
    means = {kind: sum(values) / len(values) for kind, values in kinds.items()}
    seconds = {kind: means.get(kind, 0.0) for kind in ("Af", "Ab", "Aw", "Ef", "Eb", "Ew", "Tf", "Tb", "Tw")}
    return Pace(seconds=seconds, transfer=means["Df"])
