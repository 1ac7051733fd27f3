"""What bounds a step, by one rule, and what to change about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_afd.placement import Worker
from lightning_afd.timeline import Timeline
from lightning_afd.waits import Usage, mean_usage

Bound = Literal["attention", "communication", "FFN"]
REMEDIES: Mapping[Bound, str] = {
    "attention": "give attention more of the ranks (attention=), or less to do (head='ffn', recompute='none')",
    "communication": "let more computation hide messages (micro_batches=, order=), or bring the ranks nearer together",
    "FFN": "give the experts more of the ranks (ffn=), or spread tokens more evenly over them (expert_bias_rate=)",
}
REMEDIES_TOGETHER: Mapping[Bound, str] = {
    "attention": "spread the step over more ranks, or give attention less to do (recompute='none')",
    "communication": "let more computation hide messages (micro_batches=, order='flowmoe'), or bring the ranks nearer "
    "together",
    "FFN": "spread the step over more ranks, or tokens more evenly over them (expert_bias_rate=)",
}
"""Where all ranks compute attention and experts."""
SHALLOW = "nobody is busy for half of the step, so have more under way at once (micro_batches=), and then "


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Which of three shares of a step is the largest: that is what to make shorter first.

    attention and FFN: the time that the busiest A group and the busiest F group compute, on the average of its ranks
    (which are the same in a collocated layout). communication: the time that a group waits for the network or sums
    gradients, for the group that does so longest.
    """

    bound: Bound
    """The largest one."""
    shares: Mapping[Bound, float]
    """Shares of the step (0..1)."""
    advice: str
    """One sentence: the shares, and what to change."""


def regime_of(timeline: Timeline, usage: Mapping[int, Usage]) -> Regime:
    """Judge a step by how its ranks spend it."""
    layout, compute = timeline.layout, compute_shares(timeline)
    groups = [[usage[rank] for rank in layout.ranks_of(worker) if rank in usage] for worker in layout.workers()]
    means = [mean_usage(group).shares() for group in groups if group]
    shares: dict[Bound, float] = {
        "attention": max((share for worker, share in compute.items() if worker.role == "A"), default=0.0),
        "communication": max((mean["wait_for_net"] + mean["reduce"] for mean in means), default=0.0),
        "FFN": max((share for worker, share in compute.items() if worker.role == "F"), default=0.0),
    }
    bound = max(shares, key=lambda name: shares[name])
    busy = [shares["attention"], shares["FFN"]]
    shallow = (sum(busy) if layout.collocated else max(busy)) < 0.5 and bound != "communication"
    remedies = REMEDIES_TOGETHER if layout.collocated else REMEDIES
    advice = (
        f"{bound}-bound: attention groups compute {shares['attention']:.0%} of the step, FFN groups "
        f"{shares['FFN']:.0%}, and {shares['communication']:.0%} is the network; "
        f"{SHALLOW if shallow else ''}{remedies[bound]}"
    )
    return Regime(bound=bound, shares=shares, advice=advice)


def compute_shares(timeline: Timeline) -> dict[Worker, float]:
    """Share of the step that each worker computes, on the average of those of its ranks that did anything."""
    seconds: dict[Worker, float] = {}
    ranks: dict[Worker, set[int]] = {}
    for span in timeline.spans:
        worker = timeline.worker(span)
        seconds[worker] = seconds.get(worker, 0.0) + (0.0 if span.action.is_transfer else span.seconds)
        ranks.setdefault(worker, set()).add(span.rank)
    step = timeline.seconds or 1.0
    return {worker: total / len(ranks[worker]) / step for worker, total in seconds.items()}
