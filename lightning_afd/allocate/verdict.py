"""Whether disaggregation is worth it: the plan's step time against collocated layouts, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_afd.allocate.collocated import Prediction
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.cost.times import step_costs
from lightning_afd.placement import Layout

Regime = Literal["attention-bound", "communication-bound", "FFN-bound"]


@dataclass(frozen=True, kw_only=True)
class Intensity:
    """How many FLOPs one side has for each byte between the sides, and how many it needs to be busy all the time."""

    flops_per_byte: float
    """FLOPs that the side's busy time has room for, per byte between the sides."""
    ridge: float
    """The effective ridge point: peak FLOP/s of all ranks of this side over the bytes/s between the sides."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer, with its numbers."""

    disaggregate: bool
    """Whether the plan is as fast as the fastest collocated layout."""
    regime: Regime
    """The side or network that is busy for longest."""
    dead_zone: bool
    """NICs alone need longer than a perfect division of all computation over all devices."""
    network_seconds: float
    """Busy seconds of the busiest NIC direction per step."""
    compute_seconds: float
    """All computation of a step over all devices of the cluster."""
    intensities: dict[str, Intensity]
    """By role, A and F."""
    collocated: tuple[Prediction, ...]
    """Fastest first."""
    sentence: str
    """All of it for people."""


def judge(request: Request, choice: Candidate, collocated: Iterable[Prediction]) -> Verdict:
    """Compare a choice with predictions of collocated layouts on the same cluster, transport and batch."""
    others = tuple(sorted(collocated, key=lambda prediction: prediction.seconds))
    job = request.job(choice.layout, choice.micro_batches, choice.rung)
    costs = step_costs(job)
    micro_batches = choice.passes * choice.micro_batches
    busy = costs.busy()
    network = micro_batches * max(max(worker.send, worker.receive) for worker in busy.values())
    sizes = {"A": choice.layout.attention, "F": choice.layout.ffn}
    work = micro_batches * sum(worker.compute * sizes[who.role] for who, worker in busy.items())
    compute = work / request.cluster.devices
    computes = {
        role: micro_batches * max(worker.compute for who, worker in busy.items() if who.role == role) for role in "AF"
    }
    dead = network > compute
    best = others[0].seconds if others else float("inf")
    return Verdict(
        disaggregate=choice.seconds <= best,
        regime=_regime(computes["A"], computes["F"], network),
        dead_zone=dead,
        network_seconds=network,
        compute_seconds=compute,
        intensities=_intensities(request, choice.layout, computes, network),
        collocated=others,
        sentence=_sentence(choice, others, (network, compute)),
    )


def _regime(attention: float, ffn: float, network: float) -> Regime:
    if network >= max(attention, ffn):
        return "communication-bound"
    return "attention-bound" if attention >= ffn else "FFN-bound"


def _intensities(
    request: Request, layout: Layout, seconds: Mapping[str, float], network: float
) -> dict[str, Intensity]:
    """Effective ridge points, as DisagMoE (2605.11005) has them: what all ranks of a side can compute over what the
    slower side's NICs can carry, 2 M / (M + N) of a device's own where all NICs are alike.

    FLOPs are those that the devices could have done in their busy time.
    """
    cluster, choices = request.cluster, request.choices
    own = cluster.nic.gb_per_s * 1e9 * cluster.ports
    rate = min(layout.attention * choices.attention_nics, layout.ffn * choices.ffn_nics) * own
    found = {}
    for role, ranks in (("A", layout.attention), ("F", layout.ffn)):
        ridge = ranks * cluster.device.peak(choices.precision.compute) / rate
        found[role] = Intensity(flops_per_byte=ridge * seconds[role] / network if network else math.inf, ridge=ridge)
    return found


def _sentence(choice: Candidate, others: tuple[Prediction, ...], bounds: tuple[float, float]) -> str:
    network, compute = bounds
    zone = (
        f"the NICs alone need {network:.3g} s per step, all computation spread over all devices {compute:.3g} s: "
        + ("this is the dead zone of disaggregation" if network > compute else "transfers can be hidden")
    )
    if not others:
        return f"Disaggregate: no collocated layout fits into memory. For the record, {zone}."
    best, ratio = others[0], others[0].seconds / choice.seconds
    if ratio >= 1:
        return (
            f"Disaggregate: {choice.seconds:.3g} s per step against {best.seconds:.3g} s of {best.name} "
            f"({ratio:.2f} times as fast); {zone}."
        )
    return (
        f"Do not disaggregate: {best.name} takes {best.seconds:.3g} s per step, disaggregation {choice.seconds:.3g} s "
        f"({1 / ratio:.2f} times as long); {zone}."
    )
