"""The time of a pass in closed form: quick enough for thousands of layouts, near enough to pick the ten best.

With P = 2p workers, v rounds of the ring, R micro-batches in n runs of g: a run passes a round in the longer of g times
the busiest worker (or link) and of the way of one micro-batch round the ring. The first run's forwards and the last
run's backwards are alone, between them both alternate. Equal stages give the laws of the simulator's tests:
(P - 1)(F + B + 2c) for runs of 2P, and 2c (P v - 1) beyond (P - 1)(F + B) for runs of P.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from lightning_afd.cost.times import StepCosts
from lightning_afd.placement import Role, Worker
from lightning_afd.schedule.actions import Phase

WAYS: tuple[Phase, Phase] = ("f", "b")


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What one micro-batch costs per round, by the busiest group of each role; seconds."""

    groups: int
    rounds: int
    busy: float
    """Of the busiest worker or link, forward and backward together."""
    compute: dict[tuple[Role, Phase], float]
    """Without the tail."""
    tail: float
    """Forward and backward of the tail, once per micro-batch."""
    links: dict[Phase, float]
    """Of the busiest direction of the busiest link, in the forward (f) and in the backward (b)."""
    transfer: float
    """Of one dispatch or combine, with its latency."""

    @classmethod
    def of(cls, costs: StepCosts) -> Stages:
        """Means over the rounds."""
        shape = costs.shape
        rounds = -(-shape.layers // shape.depth)
        compute: dict[tuple[Worker, Phase], float] = defaultdict(float)
        links: dict[tuple[Worker, bool, Phase], float] = defaultdict(float)
        for kind in costs.alike:
            share = len(kind.layers) / rounds
            for action, cost in kind.actions():
                if action.is_transfer:
                    sender, receiver = shape.endpoints(action)
                    links[sender, True, action.phase] += cost.send_seconds * share
                    links[receiver, False, action.phase] += cost.receive_seconds * share
                else:
                    compute[shape.owner(action), action.phase] += cost.seconds * share
        tail = sum(costs.tail[phase].seconds for phase in WAYS)
        return cls(
            groups=shape.depth,
            rounds=rounds,
            busy=_busiest(compute, links, (shape.tail, tail / rounds)),
            compute=_by_role(compute),
            tail=tail,
            links={way: max(s for (_, _, phase), s in links.items() if phase == way) for way in WAYS},
            transfer=max(cost.seconds for kind in costs.alike for op, _, cost in kind.costs if op in "DC"),
        )

    def way(self, role: Role, phase: Phase) -> float:
        """Seconds of a role's stage in the forward (f), or in the backward with its weight gradients (b)."""
        found = self.compute.get((role, phase), 0.0)
        return found + (self.compute.get((role, "w"), 0.0) if phase == "b" else 0.0)

    def busiest(self, phase: Phase) -> float:
        """Of compute and links, per micro-batch and round."""
        return max(self.links[phase], self.way("A", phase), self.way("F", phase))

    def ring(self, phase: Phase) -> float:
        """Seconds in which one micro-batch passes all workers once, without transfers; nobody waits for experts'
        weight gradients."""
        return self.groups * (self.way("A", phase) + self.compute.get(("F", phase), 0.0))


def formula_seconds(stages: Stages, micro_batches: int, group: int) -> float:
    """Seconds of a pass in runs of at most `group`, without the all-reduce of gradients and the optimizer."""
    runs, workers = -(-micro_batches // group), 2 * stages.groups
    run = micro_batches / runs
    tail = stages.tail + stages.way("A", "f") + stages.way("A", "b")
    alone = run * max(tail, stages.busiest("f") + stages.busiest("b"))
    for way in WAYS:
        round_trip = stages.ring(way) + workers * stages.transfer
        alone += (stages.rounds - 1) * max(run * stages.busiest(way), round_trip)
    first = stages.tail + sum(stages.ring(way) - stages.busiest(way) for way in WAYS)
    hops = 2 * (workers - 1) * stages.transfer
    return alone + (runs - 1) * stages.rounds * run * stages.busy + first + hops


def exposed_all_reduce(costs: StepCosts, stages: Stages, run: int) -> float:
    """What the sum of dense gradients adds to a step: it starts as soon as the last micro-batch has left a layer.

    At least that of the first layer, which comes last; more where the last run's backwards are over before.
    """
    hidden = (stages.rounds - 1) * run * stages.busiest("b")
    return max(costs.reduces[0], costs.update.all_reduce_seconds - hidden)


def _by_role(compute: Mapping[tuple[Worker, Phase], float]) -> dict[tuple[Role, Phase], float]:
    """Of the busiest group of each role."""
    roles: dict[tuple[Role, Phase], float] = defaultdict(float)
    for (worker, phase), seconds in compute.items():
        roles[worker.role, phase] = max(roles[worker.role, phase], seconds)
    return roles


def _busiest(
    compute: Mapping[tuple[Worker, Phase], float],
    links: Mapping[tuple[Worker, bool, Phase], float],
    tail: tuple[Worker, float],
) -> float:
    """Of all workers and directions of links, all phases together."""
    sums: dict[Hashable, float] = defaultdict(float)
    sums[tail[0]] += tail[1]
    for (worker, _), seconds in compute.items():
        sums[worker] += seconds
    for (worker, sends, _), seconds in links.items():
        sums[worker, sends] += seconds
    return max(sums.values())
