"""What a step costs where every rank has attention and experts: seconds, transfers, reduces, memory.

Not modelled: buffers of messages, parameters that data ranks shard beside their optimizer state, contention between
reduces and transfers unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from lightning_afd.baselines.stages import Stages
from lightning_afd.cost.compute import expert_seconds, optimizer_seconds, segment_seconds
from lightning_afd.cost.hardware import Link as PortLink
from lightning_afd.cost.job import BatchShape, Job
from lightning_afd.cost.model import ExpertsShape, LayerShape, SegmentShape
from lightning_afd.cost.reduces import sum_latency, sum_seconds
from lightning_afd.cost.routing import visits
from lightning_afd.cost.transfers import ROUTING_BYTES, row_bytes, slots_of
from lightning_afd.errors import PlanError
from lightning_afd.expert_map import split_sizes
from lightning_afd.load import Chunks, Link, Load, collocated
from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.actions import Op, Phase

T = TypeVar("T")
_Table = dict[tuple[Op, Phase], float]
"""Seconds by kind of action."""


@dataclass(frozen=True, kw_only=True)
class Collocated:
    """`stages` times `data` ranks; in each stage groups of `experts` neighbours share the experts."""

    data: int
    experts: int
    stages: int = 1

    def __post_init__(self) -> None:
        if self.data % self.experts:
            raise PlanError(f"{self.data} ranks in groups of {self.experts}: a multiple is needed")

    @property
    def replicas(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.data // self.experts


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a job (its model, cluster, micro-batch and choices) in stages of a collocated layout."""

    job: Job
    layout: Collocated
    shape: Stages
    parts: int = 1
    """A micro-batch is cut into so many parts for its experts: each counts as one of the shape's micro-batches, and
    takes its share of the attention's time."""

    @property
    def _nodes(self) -> int:
        """Nodes over which a group of experts is spread."""
        return -(-self.layout.experts // self.job.cluster.devices_per_node)

    @property
    def _near(self) -> int:
        """Ranks of a group of experts in one node."""
        return -(-self.layout.experts // self._nodes)

    @cached_property
    def part(self) -> Job:
        """The job of one group of experts with the tokens of a part: as many A as F ranks."""
        ranks, cluster = self.layout.experts, self.job.cluster
        enough = max(cluster.num_nodes, -(-2 * ranks // cluster.devices_per_node))
        return replace(
            self.job,
            layout=Layout(attention=ranks, ffn=ranks),
            cluster=replace(cluster, num_nodes=enough),
            batch=BatchShape.rows(1, max(1, self.job.batch.tokens // self.parts)),
            micro_batches=self.shape.micro_batches,
            choices=replace(self.job.choices, split_attention=self.shape.split_attention),
        )

    def load(self) -> Load:
        """For the simulator: bytes are those of one rank, and reduces have lanes of their own."""
        seconds, busy = self._seconds, self._busy
        links = self._links()
        return Load(
            seconds=lambda action: seconds[action.layer][action.op, action.phase],
            bytes=lambda action: busy[action.layer][action.op, action.phase] * links[action.op].attention,
            links=links,
            machine=collocated,
            reduce=lambda worker, layer: self.reduce_seconds(worker, layer) + self.launch,
        )

    def chunked(self, longest: float) -> Load:
        """The same with reduces in chunks of at most so many bytes on the lanes of transfers, below them."""
        worker = Worker("A", 0)
        rate = self._gradient_bytes(worker, 0) / self.reduce_seconds(worker, 0)
        chunks = Chunks(link=self._links()["D"], longest=longest / rate, launch=self.launch)
        return replace(self.load(), reduce=self.reduce_seconds, chunks=chunks)

    def _links(self) -> dict[Op, Link]:
        cluster = self.job.cluster
        nic, nvlink = (
            Link(attention=rate, ffn=rate, latency=link.latency)
            for link, rate in (
                (cluster.nic, _rate(cluster.nic) * cluster.ports),
                (cluster.nvlink, _rate(cluster.nvlink)),
            )
        )
        inside = nvlink if self._nodes == 1 else nic
        return {"D": inside, "C": inside, "H": nic}

    def _by_layer(self, cost: Callable[[int], T]) -> list[T]:
        """What each layer costs; layers of one shape are looked at once."""
        known: dict[int, T] = {}
        for layer, kind in enumerate(self.job.model.kinds):
            if kind not in known:
                known[kind] = cost(layer)
        return [known[kind] for kind in self.job.model.kinds]

    @cached_property
    def _seconds(self) -> list[_Table]:
        """Seconds of each computation of a layer, and of the tail; all ranks of a node compute at the same time."""
        tables = [*self._by_layer(self._computation), self._attention_seconds(self.job.model.segments[-1])]
        crowd = self.job.cluster.crowd
        return tables if crowd == 1 else [{key: crowd * time for key, time in table.items()} for table in tables]

    def _computation(self, layer: int) -> _Table:
        experts = expert_seconds(self.part, self.job.model.moe[layer])
        found: _Table = {("E", phase): seconds for phase, seconds in experts.items()}
        found |= self._attention_seconds(self.job.model.segments[layer])
        handling = self._handling(layer)
        return {(op, phase): seconds + handling.get(phase, 0.0) for (op, phase), seconds in found.items()}

    def _handling(self, layer: int) -> dict[Phase, float]:
        """Seconds of a core for the messages of a computation: one dispatch and one combine, sent or received."""
        experts, row = self.job.model.moe[layer], row_bytes(self.job)
        weights, (nic, local) = slots_of(self.job, layer) * ROUTING_BYTES, self._rows(experts)
        link = self.job.cluster.nic if nic else self.job.cluster.nvlink
        rows, messages = self.part.batch.tokens * (nic + local), 2 * (self.layout.experts - 1)
        return {
            "f": link.host_seconds(rows * 2 * (row + weights), messages),
            "b": link.host_seconds(rows * (2 * row + weights), messages),
        }

    def _attention_seconds(self, segment: SegmentShape) -> _Table:
        """Where attention is not split, its backward is whole."""
        whole = replace(self.job, choices=self.part.choices)
        times = segment_seconds(whole, segment, self._copies(segment.layers))
        return {("A", phase): seconds / self.parts for phase, seconds in times.items()}

    def _copies(self, layers: Iterable[LayerShape]) -> float:
        """Rows per token that a segment packs."""
        shapes = [layer.experts for layer in layers if layer.experts is not None]
        return sum(self.layout.experts * visits(self._owned(shape), shape.experts, shape.top_k) for shape in shapes)

    def _owned(self, experts: ExpertsShape) -> int:
        return split_sizes(experts.experts, self.layout.experts)[0]

    @cached_property
    def _busy(self) -> list[_Table]:
        """Seconds in which a rank's links are busy with each transfer of a layer, in each direction."""
        return self._by_layer(self._transfers)

    def _transfers(self, layer: int) -> _Table:
        experts, row, cluster = self.job.model.moe[layer], row_bytes(self.job), self.job.cluster
        stream = self.job.model.hidden * self.job.choices.precision.stream_width
        hop = cluster.nic.busy_seconds(self.part.batch.tokens * stream, 1, cluster.ports)
        weights = slots_of(self.job, layer) * ROUTING_BYTES
        return {
            ("D", "f"): self._exchange(experts, row + 2 * weights),
            ("C", "f"): self._exchange(experts, row),
            ("D", "b"): self._exchange(experts, row),
            ("C", "b"): self._exchange(experts, row + weights),
            ("H", "f"): hop,
            ("H", "b"): hop,
        }

    def _exchange(self, experts: ExpertsShape, bytes_per_row: float) -> float:
        """One all-to-all of a part: NICs and links inside the node work at the same time."""
        cluster, tokens, (nic, local) = self.job.cluster, self.part.batch.tokens, self._rows(experts)
        far = self._nodes - 1 if self.job.choices.dedup == "node" else self.layout.experts - self._near
        return max(
            cluster.nic.busy_seconds(tokens * nic * bytes_per_row, far, cluster.ports),
            cluster.nvlink.busy_seconds(tokens * local * bytes_per_row, max(1, self._near - 1)),
        )

    def _rows(self, experts: ExpertsShape) -> tuple[float, float]:
        """Rows per token that a rank sends over its NICs, and inside its node."""
        ranks, far, choices = self.layout.experts, self.layout.experts - self._near, self.job.choices
        one = visits(self._owned(experts), experts.experts, experts.top_k)
        if choices.dedup == "none":
            one = experts.top_k / ranks
        if choices.dedup == "node":
            per_node = visits(min(experts.experts, self._owned(experts) * self._near), experts.experts, experts.top_k)
            return (self._nodes - 1) * per_node, (ranks - self._nodes) * one * choices.imbalance
        return far * one * choices.imbalance, (self._near - 1) * one * choices.imbalance

    @property
    def launch(self) -> float:
        """Seconds of a reduce, or of each chunk of one, however small it is."""
        return sum_latency(self.job.cluster, self.layout.data)

    def reduce_seconds(self, worker: Worker, layer: int) -> float:
        """Summing a layer's gradients over their copies, without latency."""
        nbytes, cluster = self._gradient_bytes(worker, layer), self.job.cluster
        if worker.role == "A":
            return sum_seconds(cluster, nbytes, self.layout.data)
        return sum_seconds(cluster, nbytes, self.layout.replicas, apart=self.layout.experts)

    def _gradient_bytes(self, worker: Worker, layer: int) -> float:
        parameters = self._dense(layer) if worker.role == "A" else self._expert_parameters(layer)
        return parameters * self.job.choices.precision.gradient_bytes

    def _dense(self, segment: int) -> float:
        """Parameters of a segment on each data rank."""
        return self.job.model.segment_parameters(segment, shared=True)

    def _expert_parameters(self, layer: int) -> float:
        experts = self.job.model.moe[layer]
        return self._owned(experts) * experts.expert_parameters

    @cached_property
    def _trained(self) -> list[tuple[float, float]]:
        """Dense and expert parameters of a rank of each stage, for both directions if there are two."""
        dense, experts = ([0.0] * self.shape.depth for _ in range(2))
        own = [*self._by_layer(self._dense), self._dense(self.shape.layers)]
        routed = [*self._by_layer(self._expert_parameters), 0.0]
        for parity in range(self.shape.directions):
            for segment, (more, routed_more) in enumerate(zip(own, routed, strict=True)):
                stage = self.shape.stage_of(segment, parity)
                dense[stage] += more
                experts[stage] += routed_more
        return list(zip(dense, experts, strict=True))

    def fixed_memory(self) -> float:
        """Bytes of weights, gradients and optimizer state on a rank of the fullest stage."""
        return max(self.stage_memory(stage) for stage in range(self.shape.depth))

    def stage_memory(self, stage: int) -> float:
        """The same of any stage."""
        precision, (dense, experts) = self.job.choices.precision, self._trained[stage]
        shard = self.job.choices.shard_optimizer
        sharded = dense / self.layout.data + experts / self.layout.replicas if shard else dense + experts
        fixed = (dense + experts) * (precision.weight_bytes + precision.gradient_bytes)
        return fixed + sharded * precision.optimizer_bytes

    def seconds_of(self, *ops: Op) -> float:
        """Sum over all layers and phases of the actions of one micro-batch of the shape, transfers without latency."""
        tables = [*self._seconds, *self._busy]
        return sum(seconds for table in tables for (op, _), seconds in table.items() if op in ops)

    def work(self, *, again: bool = False) -> tuple[list[float], list[float]]:
        """Seconds of computation, and of sending, of each stage for one micro-batch of the shape.

        `again`: forwards count twice.
        """
        compute, network = ([0.0] * self.shape.depth for _ in range(2))
        busy = self._by_layer(lambda layer: _total(self._busy[layer], "DC", again))
        seconds = self._by_layer(lambda layer: _total(self._seconds[layer], "AE", again))
        seconds.append(_total(self._seconds[-1], "A", again))
        hops = _total(self._busy[0], "H", False)
        for parity in range(self.shape.directions):
            stages = [self.shape.stage_of(segment, parity) for segment in range(self.shape.layers + 1)]
            for segment, stage in enumerate(stages):
                compute[stage] += seconds[segment] / self.shape.directions
                if segment < self.shape.layers:
                    hop = hops if stage != stages[segment + 1] else 0.0
                    network[stage] += (busy[segment] + hop) / self.shape.directions
        return compute, network

    def update_seconds(self) -> float:
        """The optimizer's step on the fullest stage."""
        shard = self.job.choices.shard_optimizer
        shares = (self.layout.data, self.layout.replicas) if shard else (1, 1)
        most = max(dense / shares[0] + experts / shares[1] for dense, experts in self._trained)
        return optimizer_seconds(self.job, most)


def _total(table: _Table, ops: str, again: bool) -> float:
    return sum((1 + (again and phase == "f")) * seconds for (op, phase), seconds in table.items() if op in ops)


def free_transfers(load: Load) -> Load:
    """The same load with transfers that take no time."""
    links = {op: replace(link, latency=0) for op, link in load.links.items()}
    return replace(load, bytes=lambda action: 0, links=links)


def _rate(link: PortLink) -> float:
    return link.gb_per_s * 1e9 * link.efficiency
