"""Who sends how many rows to whom: copies of tokens between an A group and an F group, by kind of link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_afd.cost.job import Job
from lightning_afd.cost.model import ExpertsShape
from lightning_afd.cost.routing import visits
from lightning_afd.expert_map import split_sizes
from lightning_afd.placement import Worker


@dataclass(frozen=True, kw_only=True)
class Side:
    """Rows of one micro-batch (of all A ranks) at the busiest rank of one side."""

    nic_rows: float
    """Rows that cross its NICs, one way."""
    local_rows: float
    """Rows over the links inside the node."""
    peers: int
    """Ranks that they are exchanged with, a message each."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Dispatch of one layer and micro-batch; combine is the same the other way round."""

    attention: Side
    ffn: Side
    copies: float
    """Rows per token of an A rank, to all F ranks together."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Rows of one layer and micro-batch (of all A ranks) on the busiest F rank."""

    experts: int
    """Experts that it owns."""
    tokens: float
    """Rows that arrive: one per token and rank."""
    slots: float
    """Rows of the grouped GEMMs: one per token and expert."""


def load_of(job: Job, experts: ExpertsShape) -> Load:
    """The load of the F rank with most experts, times the job's imbalance."""
    total = job.layout.attention * job.batch.tokens
    largest = split_sizes(experts.experts, job.layout.ffn)[0]
    imbalance = job.choices.imbalance
    return Load(
        experts=largest,
        tokens=total * min(1.0, imbalance * visits(largest, experts.experts, experts.top_k)),
        slots=total * min(imbalance * experts.top_k * largest / experts.experts, min(experts.top_k, largest)),
    )


@dataclass(frozen=True)
class _Node:
    """F ranks of one group on one node."""

    copies: tuple[float, ...]
    """Rows per token to each of them."""
    over_nic: float
    """Rows per token that come to all of them over the network."""


def traffic(job: Job, experts: ExpertsShape, senders: Worker, receivers: Worker) -> Traffic:
    """Rows between an A group and an F group, whose ranks lie on nodes in the order of their numbers.

    With `dedup="node"` one copy per node crosses the network and the links of that node carry it on, as in DeepEP.
    """
    a_nodes = [job.cluster.node_of(rank) for rank in job.layout.ranks_of(senders)]
    nodes = _ffn_nodes(job, experts, receivers)
    everywhere, tokens = sum(node.over_nic for node in nodes.values()), job.batch.tokens
    near = [nodes.get(number, _Node((), 0.0)) for number in set(a_nodes)]
    attention = Side(
        nic_rows=tokens * max(everywhere - node.over_nic for node in near),
        local_rows=tokens * max(sum(node.copies) for node in near),
        peers=len(nodes) if job.choices.dedup == "node" else job.layout.ffn,
    )
    return Traffic(attention=attention, ffn=_ffn_side(job, a_nodes, nodes), copies=copies(job, experts))


def copies(job: Job, experts: ExpertsShape) -> float:
    """Rows per token to all F ranks of a group together."""
    owned = split_sizes(experts.experts, job.layout.ffn)
    return sum(owned.count(size) * _copies(job, experts, size) for size in set(owned))


def _ffn_nodes(job: Job, experts: ExpertsShape, receivers: Worker) -> dict[int, _Node]:
    sizes: dict[int, list[int]] = {}
    owned = split_sizes(experts.experts, job.layout.ffn)
    for rank, size in zip(job.layout.ranks_of(receivers), owned, strict=True):
        sizes.setdefault(job.cluster.node_of(rank), []).append(size)
    rows = {size: _copies(job, experts, size) for size in set(owned)}
    return {
        node: _Node(
            tuple(rows[size] for size in own),
            visits(sum(own), experts.experts, experts.top_k)
            if job.choices.dedup == "node"
            else sum(rows[size] for size in own),
        )
        for node, own in sizes.items()
    }


def _ffn_side(job: Job, a_nodes: Sequence[int], nodes: Mapping[int, _Node]) -> Side:
    """The busiest F rank; those of a node take turns with what comes to all of them over the network, A rank after A
    rank (`Peers.expert_ranks`), if it comes once."""
    nic, local = [], []
    tokens, choices, attention = job.batch.tokens, job.choices, job.layout.attention
    for number, node in nodes.items():
        near = a_nodes.count(number)
        busiest = max(node.copies) * choices.imbalance
        busiest = busiest if choices.dedup == "none" else min(1.0, busiest)
        by_node = choices.dedup == "node"
        far = _most_relayed(a_nodes, number, len(node.copies)) if by_node else attention - near
        nic.append(tokens * far * (node.over_nic if by_node else busiest))
        local.append(tokens * (attention if by_node else near) * busiest)
    return Side(nic_rows=max(nic), local_rows=max(local), peers=attention)


def _most_relayed(a_nodes: Sequence[int], number: int, ranks: int) -> int:
    """A ranks of other nodes whose rows the busiest of so many F ranks of a node takes."""
    return max(sum(node != number for node in a_nodes[first::ranks]) for first in range(ranks))


def _copies(job: Job, experts: ExpertsShape, owned: int) -> float:
    """Rows per token to a rank that owns so many experts."""
    if job.choices.dedup == "none":
        return experts.top_k * owned / experts.experts
    return visits(owned, experts.experts, experts.top_k)
