"""Who sends how many rows to whom: copies of tokens between an A group and an F group, by kind of link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_afd.cost.job import Job
from lightning_afd.cost.model import ExpertsShape
from lightning_afd.cost.routing import visits
from lightning_afd.placement import Worker, split_sizes


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


def traffic(job: Job, experts: ExpertsShape, senders: Worker, receivers: Worker) -> Traffic:
    """Rows between an A group and an F group, whose ranks lie on nodes in the order of their numbers.

    With `dedup="node"` one copy per node crosses the network and the links of that node carry it on, as in DeepEP.
    """
    cluster, layout, tokens = job.cluster, job.layout, job.batch.tokens
    sizes = split_sizes(experts.experts, layout.ffn)
    copies = [_copies(job, experts, size) for size in sizes]
    a_nodes = Counter(cluster.node_of(rank) for rank in layout.ranks_of(senders))
    f_nodes = [cluster.node_of(rank) for rank in layout.ranks_of(receivers)]
    by_node = {node: [i for i, own in enumerate(f_nodes) if own == node] for node in dict.fromkeys(f_nodes)}
    over_nic = {node: _node_copies(job, experts, [sizes[i] for i in own]) for node, own in by_node.items()}
    inside = {node: sum(copies[i] for i in own) for node, own in by_node.items()}
    everywhere = sum(over_nic.values())
    attention = Side(
        nic_rows=tokens * max(everywhere - over_nic.get(node, 0.0) for node in a_nodes),
        local_rows=tokens * max(inside.get(node, 0.0) for node in a_nodes),
        peers=len(by_node) if job.choices.dedup == "node" else layout.ffn,
    )
    return Traffic(
        attention=attention,
        ffn=_ffn_side(
            job, a_nodes, [(node, [copies[i] for i in own], over_nic[node]) for node, own in by_node.items()]
        ),
        copies=sum(copies),
    )


def _ffn_side(job: Job, a_nodes: Counter[int], nodes: Sequence[tuple[int, Sequence[float], float]]) -> Side:
    """The busiest F rank; `nodes` are (node, copies per token by rank, copies per token over its NICs)."""
    nic, local = [], []
    tokens, imbalance = job.batch.tokens, job.choices.imbalance
    for node, copies, over_nic in nodes:
        near = a_nodes[node]
        far = job.layout.attention - near
        busiest = max(copies) * imbalance
        if job.choices.dedup != "none":
            busiest = min(1.0, busiest)
        forwarded = job.choices.dedup == "node"
        nic.append(tokens * far * (over_nic / len(copies) if forwarded else busiest))
        local.append(tokens * (job.layout.attention if forwarded else near) * busiest)
    return Side(nic_rows=max(nic), local_rows=max(local), peers=job.layout.attention)


def _copies(job: Job, experts: ExpertsShape, owned: int) -> float:
    """Rows per token to a rank that owns so many experts."""
    if job.choices.dedup == "none":
        return experts.top_k * owned / experts.experts
    return visits(owned, experts.experts, experts.top_k)


def _node_copies(job: Job, experts: ExpertsShape, sizes: Sequence[int]) -> float:
    """Rows per token over the network to a node whose ranks own so many experts each."""
    if job.choices.dedup == "node":
        return visits(sum(sizes), experts.experts, experts.top_k)
    return sum(_copies(job, experts, size) for size in sizes)
