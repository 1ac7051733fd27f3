"""Seconds of summing dense gradients over data-parallel ranks."""

from __future__ import annotations

import math

from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import Job


def sum_seconds(cluster: Cluster, nbytes: float, ranks: int, *, apart: int = 1, nics: float = 1.0) -> float:
    """An all-reduce over ranks whose numbers are so far apart, without latency: rings inside the nodes, and for each
    rank's share of the sum between them, both at the same time (NCCL uses all NICs of a node in this way).

    `nics`: those of a rank, in units of an even share of the node's.
    """
    near = max(1, min(ranks, cluster.devices_per_node // apart))
    nodes = -(-ranks // near)
    return max(
        cluster.nvlink.busy_seconds(2 * (near - 1) / near * nbytes),
        cluster.nic.busy_seconds(2 * (nodes - 1) / nodes * nbytes / near, 1, cluster.ports * nics),
    )


def sum_latency(cluster: Cluster, ranks: int) -> float:
    """Seconds of an all-reduce over neighbours, however small it is: up and down a binary tree, as in NCCL."""
    near = min(ranks, cluster.devices_per_node)
    inside, between = math.ceil(math.log2(near)), math.ceil(math.log2(-(-ranks // near)))
    return 2 * (inside * cluster.nvlink.latency + between * cluster.nic.latency)


def reduce_seconds(job: Job) -> tuple[float, ...]:
    """Of each attention segment, over the A ranks of its group; their ranks are neighbours."""
    cluster, ranks, nics = job.cluster, job.layout.attention, job.choices.attention_nics
    latency = sum_latency(cluster, ranks)

    def seconds(segment: int) -> float:
        parameters = job.model.segment_parameters(segment, shared=job.shared_on_attention)
        return sum_seconds(cluster, parameters * job.choices.precision.gradient_bytes, ranks, nics=nics) + latency

    known: dict[int, float] = {}
    for layer, kind in enumerate(job.model.kinds):
        if kind not in known:
            known[kind] = seconds(layer)
    return (*(known[kind] for kind in job.model.kinds), seconds(len(job.model.kinds)))
