"""Whether disaggregation is worth it: the plan's step time against collocated layouts, and what limits it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_afd.allocate.collocated import Prediction
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.cost.times import StepCosts, step_costs

Regime = Literal["attention-bound", "communication-bound", "FFN-bound"]


@dataclass(frozen=True, kw_only=True)
class Intensity:
    """How many FLOPs one side has for each byte on its NICs, and how many it would need to keep them busy."""

    flops_per_byte: float
    ridge: float
    """Of the devices and NICs of this side: peak FLOP/s over NIC bytes/s, both of all its ranks."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer, with its numbers."""

    disaggregate: bool
    regime: Regime
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
        intensities={role: _intensity(request, costs, role) for role in "AF"},
        collocated=others,
        sentence=_sentence(choice, others, (network, compute)),
    )


def _regime(attention: float, ffn: float, network: float) -> Regime:
    if network >= max(attention, ffn):
        return "communication-bound"
    return "attention-bound" if attention >= ffn else "FFN-bound"


def _intensity(request: Request, costs: StepCosts, role: str) -> Intensity:
    """Of one rank; the ridge is that of its device and its own NICs."""
    cluster, choices = request.cluster, request.choices
    peak = cluster.device.peak(choices.precision.compute)
    share = choices.attention_nics if role == "A" else choices.ffn_nics
    rate = cluster.nic.gb_per_s * 1e9 * cluster.ports * share
    seconds, busy = max(
        (worker.compute, max(worker.send, worker.receive)) for who, worker in costs.busy().items() if who.role == role
    )
    return Intensity(flops_per_byte=peak / rate * seconds / busy if busy else float("inf"), ridge=peak / rate)


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
