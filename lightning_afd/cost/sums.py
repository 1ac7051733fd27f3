"""Seconds of an all-reduce."""

from __future__ import annotations

import math

from lightning_afd.cost.hardware import Cluster


def sum_seconds(cluster: Cluster, nbytes: float, ranks: int, *, apart: int = 1, nics: float = 1.0) -> float:
    """Over ranks whose numbers are so far apart, without latency: rings inside the nodes, and for each rank's share of
    the sum between them, both at the same time (NCCL uses all NICs of a node in this way).

    A ring of n ranks sends 2 (n - 1) / n of the sum per rank (Patarasu and Yuan, J. Parallel Distrib. Comput. 69, 2009:
    bandwidth optimal). `nics`: those of a rank, in units of an even share of the node's.
    """
    near = _on_a_node(cluster, ranks, apart)
    nodes = -(-ranks // near)
    return max(
        cluster.nvlink.busy_seconds(2 * (near - 1) / near * nbytes),
        cluster.nic.busy_seconds(2 * (nodes - 1) / nodes * nbytes / near, 1, cluster.ports * nics),
    )


def sum_latency(cluster: Cluster, ranks: int) -> float:
    """Over neighbours, however small the sum is: up and down a binary tree, as in NCCL."""
    near = _on_a_node(cluster, ranks, 1)
    inside, between = math.ceil(math.log2(near)), math.ceil(math.log2(-(-ranks // near)))
    return 2 * (inside * cluster.nvlink.latency + between * cluster.nic.latency)


def _on_a_node(cluster: Cluster, ranks: int, apart: int) -> int:
    """How many of them share a node."""
    return max(1, min(ranks, cluster.devices_per_node // apart))
