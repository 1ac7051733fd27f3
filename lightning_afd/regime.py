"""What bounds a step, by one rule, and what to change about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_afd.timeline import Timeline
from lightning_afd.waits import Usage, mean_usage

Bound = Literal["attention", "communication", "FFN"]
REMEDIES: Mapping[Bound, str] = {
    "attention": "give attention more of the ranks (attention=), or less to do (head='ffn', recompute='none')",
    "communication": "let more computation hide messages (micro_batches=, order=), or bring the ranks nearer together",
    "FFN": "give the experts more of the ranks (ffn=), or spread tokens more evenly over them (expert_bias_rate=)",
}
SHALLOW = "nobody is busy for half of the step, so have more under way at once (micro_batches=), and then "


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Which of three shares of a step is the largest: that is what to make shorter first.

    attention and FFN: the time that the busiest A group and the busiest F group compute, on the average of its ranks.
    communication: the time that a group waits for the network or sums gradients, for the group that does so longest.
    """

    bound: Bound
    shares: Mapping[Bound, float]
    """Shares of the step (0..1)."""
    advice: str
    """One sentence: the shares, and what to change."""


def regime_of(timeline: Timeline, usage: Mapping[int, Usage]) -> Regime:
    """Judge a step by how its ranks spend it."""
    groups = {
        worker: mean_usage(usage[rank] for rank in timeline.layout.ranks_of(worker) if rank in usage)
        for worker in timeline.layout.workers()
        if any(rank in usage for rank in timeline.layout.ranks_of(worker))
    }
    shares: dict[Bound, float] = {
        "attention": max((u.shares()["compute"] for w, u in groups.items() if w.role == "A"), default=0.0),
        "communication": max((u.shares()["wait_for_net"] + u.shares()["reduce"] for u in groups.values()), default=0.0),
        "FFN": max((u.shares()["compute"] for w, u in groups.items() if w.role == "F"), default=0.0),
    }
    bound = max(shares, key=lambda name: shares[name])
    shallow = max(shares["attention"], shares["FFN"]) < 0.5 and bound != "communication"
    advice = (
        f"{bound}-bound: attention groups compute {shares['attention']:.0%} of the step, FFN groups "
        f"{shares['FFN']:.0%}, and {shares['communication']:.0%} is the network; "
        f"{SHALLOW if shallow else ''}{REMEDIES[bound]}"
    )
    return Regime(bound=bound, shares=shares, advice=advice)
