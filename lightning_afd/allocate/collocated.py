"""Step times of layouts in which every rank has attention and experts: what disaggregation has to beat.

Closed formulas of the same costs: pipeline stages of L / depth layers with `virtual` stages each (interleaved 1F1B),
experts over `ranks` ranks, data parallel over the rest. `Predict` is the place for a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lightning_afd.allocate.fit import Fitting
from lightning_afd.allocate.request import Recompute, Request, Rung
from lightning_afd.cost.compute import expert_seconds, optimizer_seconds, segment_seconds
from lightning_afd.cost.job import Job
from lightning_afd.cost.memory import dense_parameters, expert_parameters
from lightning_afd.cost.routing import visits
from lightning_afd.cost.sums import sum_seconds
from lightning_afd.cost.transfers import ROUTING_BYTES, row_bytes, slots_of
from lightning_afd.placement import Layout

Overlap = Literal["none", "chunks", "passes"]
"""Transfers are exposed; hidden behind the other half of a micro-batch's computation (FlowMoE); hidden behind the
backward of another micro-batch (DualPipe)."""
CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A layout and what a step of it takes."""

    name: str
    seconds: float
    detail: str
    """Sizes, for people."""
    memory_bytes: float
    micro_batches: int | None = None
    """Per step and rank, where a strategy can do the same; what is computed again stands below."""
    recompute: Recompute = "none"
    recompute_experts: bool = False


Predict = Callable[[Request], Prediction | None]
"""The best layout of one kind, None where the cluster or memory has no room for it."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Sizes of a collocated layout."""

    ranks: int
    """That share the experts of a layer."""
    depth: int
    """Pipeline stages."""
    virtual: int


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Seconds of one MoE layer with its attention, on one rank."""

    forward: float
    backward: float
    weights: float
    """The part of the backward that nobody waits for."""
    exchange: float
    """One all-to-all."""

    def slower(self, factor: float) -> _Layer:
        """With computations that take so many times as long."""
        forward, backward, weights = (factor * value for value in (self.forward, self.backward, self.weights))
        return replace(self, forward=forward, backward=backward, weights=weights)


def baselines() -> dict[str, Predict]:
    """The layouts to compare with, by name."""
    return {
        "experts across two nodes": lambda request: best("experts across two nodes", request, 2, "none"),
        "experts inside a node": lambda request: best("experts inside a node", request, 1, "none"),
        "FlowMoE inside a node": lambda request: best("FlowMoE inside a node", request, 1, "chunks"),
        "DualPipe across two nodes": lambda request: best("DualPipe across two nodes", request, 2, "passes"),
    }


def best(name: str, request: Request, nodes: int, overlap: Overlap) -> Prediction | None:
    """The fastest layout that fits whose experts are shared by the ranks of so many nodes."""
    cluster, experts = request.cluster, min(layer.experts for layer in request.model.moe)
    ranks = nodes * cluster.devices_per_node
    if ranks > min(experts, cluster.devices) or cluster.devices % ranks:
        return None
    tried = [
        _predict(name, request, _Layout(ranks=ranks, depth=depth, virtual=virtual), (rung, overlap))
        for depth in _divisors(cluster.devices // ranks)
        for virtual in ((1, 2, 4) if overlap != "passes" else (1,))
        for rung in request.rungs
        if depth * virtual <= len(request.model.moe)
    ]
    fits = [found for found in tried if found.memory_bytes <= cluster.device.memory_bytes]
    return min(fits, key=lambda found: found.seconds, default=None)


def _predict(name: str, request: Request, layout: _Layout, way: tuple[Rung, Overlap]) -> Prediction:
    rung, overlap = way
    job = _rank_job(request, layout, rung)
    layer, tail = _layer(job, layout, overlap), sum(segment_seconds(job, job.model.segments[-1], 0.0).values())
    replicas = request.cluster.devices // layout.depth
    micro_batches, stage = request.per_replica(replicas), -(-len(request.model.moe) // layout.depth)
    layer, tail = layer.slower(request.cluster.crowd), tail * request.cluster.crowd
    one = _both_ways(layer, overlap, rung) * stage
    bubble = (layout.depth - 1) * one / layout.virtual
    if overlap == "passes":  # DeepSeek-V3 (2412.19437), table 2: (PP / 2 - 1)(F&B + B - 3 W)
        bubble = max(0.0, layout.depth / 2 - 1) * max(0.0, one + stage * (layer.backward - 3 * layer.weights))
    update = _update_seconds(request, job, layout, stage * layer.backward)
    stages = f"{layout.depth} x {layout.virtual} stages"
    return Prediction(
        name=name,
        seconds=micro_batches * (one + tail / layout.depth) + bubble + update,
        detail=f"experts over {layout.ranks} ranks, {stages}, {micro_batches} micro-batches, recompute={rung[0]}",
        memory_bytes=_memory(request, layout, rung, parameters=2 if overlap == "passes" else 1),
    )


def _rank_job(request: Request, layout: _Layout, rung: Rung) -> Job:
    """A job whose A and F ranks each do what a collocated rank does; both roles are counted on it one after another."""
    cluster = request.cluster
    nodes = max(cluster.num_nodes, -(-2 * layout.ranks // cluster.devices_per_node))
    wide = replace(request, cluster=replace(cluster, num_nodes=nodes))
    job = wide.job(Layout(attention=layout.ranks, ffn=layout.ranks), 1, rung)
    return replace(job, choices=replace(job.choices, split_attention=True))


def _layer(job: Job, layout: _Layout, overlap: Overlap) -> _Layer:
    """Means over the layers. Chunks of a micro-batch are computed one by one, at the rate of smaller matrices."""
    segments, experts = job.model.segments[:-1], job.model.moe[0]
    copies = layout.ranks * visits(experts.experts // layout.ranks, experts.experts, experts.top_k)
    known = {segment: segment_seconds(job, segment, copies) for segment in set(segments)}
    attention = {phase: sum(known[s][phase] for s in segments) / len(segments) for phase in ("f", "b", "w")}
    ffn = expert_seconds(job, experts)
    return _Layer(
        forward=attention["f"] + ffn["f"],
        backward=attention["b"] + attention["w"] + ffn["b"] + ffn["w"],
        weights=attention["w"] + ffn["w"],
        exchange=_exchange(job, layout.ranks),
    )


def _both_ways(layer: _Layer, overlap: Overlap, rung: Rung) -> float:
    """Forward and backward of one micro-batch through one layer; a full recomputation exchanges the rows again."""
    forward, backward = 2 * layer.exchange, (4 if rung[0] == "full" else 2) * layer.exchange
    if overlap == "passes":
        return max(layer.forward + layer.backward, forward + backward)
    if overlap == "none":
        return layer.forward + layer.backward + forward + backward
    pairs = ((layer.forward, forward), (layer.backward, backward))
    return sum(max(pair) + min(pair) / CHUNKS for pair in pairs)


def _exchange(job: Job, ranks: int) -> float:
    """One all-to-all of a micro-batch between ranks that fill one or more nodes; as the job's dedup says."""
    experts, cluster, tokens = job.model.moe[0], job.cluster, job.batch.tokens
    per_node = cluster.devices_per_node
    nodes, share = max(1, ranks // per_node), experts.experts // ranks
    to_rank = visits(share, experts.experts, experts.top_k) if job.choices.dedup != "none" else experts.top_k / ranks
    away = to_rank * (ranks - ranks // nodes)
    if job.choices.dedup == "node":
        away = (nodes - 1) * visits(experts.experts // nodes, experts.experts, experts.top_k)
    near = to_rank * (ranks // nodes - 1) * (nodes if job.choices.dedup == "node" else 1)
    row = row_bytes(job) + slots_of(job, 0) * ROUTING_BYTES
    uneven = job.choices.imbalance
    nic = cluster.nic.busy_seconds(tokens * away * row * uneven, ranks, cluster.ports)
    nvlink = cluster.nvlink.busy_seconds(tokens * near * row * uneven, ranks)
    return max(nic, nvlink) + (cluster.nic if nodes > 1 else cluster.nvlink).latency


def _update_seconds(request: Request, job: Job, layout: _Layout, hidden: float) -> float:
    """The exposed part of the all-reduces (dense gradients over all replicas, experts' over theirs), and the update."""
    cluster, precision = request.cluster, job.choices.precision
    replicas = cluster.devices // layout.depth
    dense, experts = (count / layout.depth for count in (dense_parameters(job, 0), expert_parameters(job, 0, 0)))
    sums = ((dense, replicas, 1), (experts, replicas // layout.ranks, layout.ranks))
    total = sum(
        sum_seconds(cluster, count * precision.gradient_bytes, ranks, apart=apart) for count, ranks, apart in sums
    )
    sharded = dense / (replicas if job.choices.shard_optimizer else 1)
    stage = -(-len(request.model.moe) // layout.depth)
    return max(total / stage, total - hidden) + optimizer_seconds(job, sharded + experts)


def _memory(request: Request, layout: _Layout, rung: Rung, *, parameters: int) -> float:
    """Bytes of the fullest rank: 1F1B holds the activations of L layers on each rank, the interleaved one
    L (1 + (depth - 1) / (depth virtual)); with full recomputation they are the inputs of the layers.
    DualPipe holds two sets of parameters."""
    job = _rank_job(request, layout, rung)
    attention, ffn = Fitting(replace(request, cluster=job.cluster)).sides(job.layout, rung)
    layers, replicas = len(request.model.moe), request.cluster.devices // layout.depth
    more = (layout.depth - 1) / (layout.depth * layout.virtual) if layout.virtual > 1 else 0.0
    held = min(layers * (1 + more), layers / layout.depth * request.per_replica(replicas))
    each = attention.per_forward + ffn.per_forward
    if rung[0] == "full":
        each = job.batch.tokens * job.model.hidden * job.choices.precision.stream_width
    return parameters * (attention.static + ffn.static) / layout.depth + attention.once + held * each


def _divisors(number: int) -> Iterator[int]:
    return (part for part in range(1, number + 1) if number % part == 0)
