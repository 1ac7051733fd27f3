"""The width of experts at which attention and experts compute for equally long, found by measuring."""

from __future__ import annotations

import statistics
from dataclasses import replace

from lightning_afd.bench.engine_step import EngineStep, computing
from lightning_afd.bench.job import Job
from lightning_afd.bench.names import Spec

NEAR = 0.05
"""By how much the longer one may exceed the other."""
TRIES, REPEATS = 6, 5
ALIGNED = 8
"""Numbers of which the width is a multiple: 16 bytes in bfloat16, 32 in float32."""


def balance(job: Job) -> None:
    """Collective: give the job's workload another width, the best one of a few tries."""
    tried, width = dict[int, float](), aligned(job.workload.width)
    for _ in range(TRIES):
        tried[width] = ffn_over_attention(job, width)
        if max(tried[width], 1 / tried[width]) < 1 + NEAR:
            break
        width = aligned(next_width(tried))
        if width in tried:
            break
    best = min(tried, key=lambda width: max(tried[width], 1 / tried[width]))
    job.use(replace(job.workload, width=best))


def aligned(width: int) -> int:
    """The next width whose rows fill whole vectors: some systems multiply no others."""
    return max(ALIGNED, round(width / ALIGNED) * ALIGNED)


def next_width(tried: dict[int, float]) -> int:
    """Where the ratio of the two should be 1: on the line through the two best tries, or through the origin."""
    near = sorted(tried, key=lambda width: abs(tried[width] - 1))[:2]
    if len(near) == 1:
        return max(1, round(near[0] / tried[near[0]]))
    (one, other) = near
    slope = (tried[other] - tried[one]) / (other - one)
    if slope <= 0:  # noise
        return max(1, round(one / tried[one]))
    return max(1, round(one + (1 - tried[one]) / slope))


def ffn_over_attention(job: Job, width: int) -> float:
    """Collective: seconds that experts compute over those of attention, in the median of a few steps."""
    job.use(replace(job.workload, width=width))
    step = EngineStep(job, Spec(strategy="afd", order="af-pipe", micro_batches=job.arena.micro_batches))
    step.keep_messages()
    ratios = []
    for _ in range(REPEATS):
        _, parts = job.slowest(step.compute_alone)
        busiest = {
            role: max(computing(part) for rank, part in enumerate(parts) if step.layout.worker_of(rank).role == role)
            for role in ("A", "F")
        }
        ratios.append(busiest["F"] / busiest["A"])
    return statistics.median(ratios)
