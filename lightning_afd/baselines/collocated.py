"""What a step costs where every rank has attention and experts: seconds, transfers, reduces, memory.

Not modelled: buffers of messages, parameters that data ranks shard beside their optimizer state, contention between
reduces and transfers unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_afd.baselines.stages import Stages
from lightning_afd.cost.compute import expert_seconds, optimizer_seconds, segment_seconds
from lightning_afd.cost.hardware import Link as PortLink
from lightning_afd.cost.job import BatchShape, Job
from lightning_afd.cost.memory import scheduled_activations
from lightning_afd.cost.model import ExpertsShape
from lightning_afd.cost.routing import visits
from lightning_afd.cost.sums import sum_latency, sum_seconds
from lightning_afd.cost.times import Key
from lightning_afd.cost.transfers import ROUTING_BYTES, row_bytes, slots_of
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout, Worker, split_sizes
from lightning_afd.schedule.actions import Op
from lightning_afd.schedule.shape import Schedule
from lightning_afd.simulate import Chunks, Link, Load, collocated


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
            seconds=lambda action: seconds[action.op, action.layer, action.phase],
            bytes=lambda action: busy[action.op, action.layer, action.phase] * links[action.op].attention,
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

    @cached_property
    def _seconds(self) -> dict[Key, float]:
        """Seconds of each computation; where attention is not split, its backward and that of experts are whole."""
        found: dict[Key, float] = {}
        choices, segments = self.part.choices, self.job.model.segments
        whole = replace(self.job, choices=choices)
        attention = {key: segment_seconds(whole, *key) for key in {(s, self._copies(s.layers)) for s in segments}}
        experts = {layer: expert_seconds(self.part, layer) for layer in set(self.job.model.moe)}
        for layer, segment in enumerate(segments):
            times = attention[segment, self._copies(segment.layers)]
            found |= {("A", layer, phase): seconds / self.parts for phase, seconds in times.items()}
        for layer, shape in enumerate(self.job.model.moe):
            found |= {("E", layer, phase): seconds for phase, seconds in experts[shape].items()}
        return found

    def _copies(self, layers: Iterable[object]) -> float:
        """Rows per token that a segment packs."""
        shapes = [layer.experts for layer in layers if getattr(layer, "experts", None)]  # type: ignore[attr-defined]
        return sum(self.layout.experts * visits(self._owned(shape), shape.experts, shape.top_k) for shape in shapes)

    def _owned(self, experts: ExpertsShape) -> int:
        return split_sizes(experts.experts, self.layout.experts)[0]

    @cached_property
    def _busy(self) -> dict[Key, float]:
        """Seconds in which a rank's links are busy with each transfer, in each direction."""
        found: dict[Key, float] = {}
        tokens, row, cluster = self.part.batch.tokens, row_bytes(self.job), self.job.cluster
        stream = self.job.model.hidden * self.job.choices.precision.stream_width
        hop = cluster.nic.busy_seconds(tokens * stream, 1, cluster.ports)
        for layer, experts in enumerate(self.job.model.moe):
            weights = slots_of(self.job, layer) * ROUTING_BYTES
            extra = {("D", "f"): 2 * weights, ("C", "f"): 0, ("D", "b"): 0, ("C", "b"): weights}
            found |= {(op, layer, way): self._exchange(experts, row + more) for (op, way), more in extra.items()}  # type: ignore[misc]
            found |= {("H", layer, "f"): hop, ("H", layer, "b"): hop}
        return found

    def _exchange(self, experts: ExpertsShape, bytes_per_row: float) -> float:
        """One all-to-all of a part: NICs and links inside the node work at the same time."""
        cluster, tokens, choices = self.job.cluster, self.part.batch.tokens, self.job.choices
        ranks, far = self.layout.experts, self.layout.experts - self._near
        one = visits(self._owned(experts), experts.experts, experts.top_k)
        if choices.dedup == "none":
            one = experts.top_k / ranks
        nic, local = far * one * choices.imbalance, (self._near - 1) * one * choices.imbalance
        if choices.dedup == "node":
            per_node = visits(min(experts.experts, self._owned(experts) * self._near), experts.experts, experts.top_k)
            nic, local = (self._nodes - 1) * per_node, (ranks - self._nodes) * one * choices.imbalance
        messages = self._nodes - 1 if choices.dedup == "node" else far
        return max(
            cluster.nic.busy_seconds(tokens * nic * bytes_per_row, messages, cluster.ports),
            cluster.nvlink.busy_seconds(tokens * local * bytes_per_row, max(1, self._near - 1)),
        )

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
        model, shape = self.job.model, self.job.model.segments[segment]
        found = sum(layer.attention_parameters(shared=True) for layer in shape.layers)
        tables = int(shape.embeds) + int(bool(shape.head) and not model.tied)
        return found + tables * model.vocab * model.hidden

    def _expert_parameters(self, layer: int) -> float:
        experts = self.job.model.moe[layer]
        return self._owned(experts) * experts.expert_parameters

    def _trained(self, stage: int) -> tuple[float, float]:
        """Dense and expert parameters of a rank of a stage, for both directions if there are two."""
        parities = range(self.shape.directions)
        segments = [(s, m) for m in parities for s in range(self.shape.layers + 1)]
        own = [segment for segment, m in segments if self.shape.stage_of(segment, m) == stage]
        experts = [self._expert_parameters(layer) for layer in own if layer < self.shape.layers]
        return sum(self._dense(segment) for segment in own), sum(experts)

    def fixed_memory(self) -> float:
        """Bytes of weights, gradients and optimizer state on a rank of the fullest stage."""
        return max(self._fixed_memory(stage) for stage in range(self.shape.depth))

    def _fixed_memory(self, stage: int) -> float:
        precision, (dense, experts) = self.job.choices.precision, self._trained(stage)
        shard = self.job.choices.shard_optimizer
        sharded = dense / self.layout.data + experts / self.layout.replicas if shard else dense + experts
        fixed = (dense + experts) * (precision.weight_bytes + precision.gradient_bytes)
        return fixed + sharded * precision.optimizer_bytes

    def memory(self, schedule: Schedule) -> float:
        """Bytes on a rank of the fullest stage, with the activations that it holds at most."""
        found = [self._fixed_memory(stage) for stage in range(self.shape.depth)]
        for worker, program in schedule.programs.items():
            found[worker.group] += scheduled_activations(self.part, worker, program)
        return max(found)

    def seconds_of(self, *ops: Op) -> float:
        """Sum over all layers and phases of the actions of one micro-batch of the shape, transfers without latency."""
        return sum(seconds for (op, _, _), seconds in (self._seconds | self._busy).items() if op in ops)

    def work(self) -> tuple[list[float], list[float]]:
        """Seconds of computation, and of sending, of each stage for one micro-batch of the shape."""
        compute, network = ([0.0] * self.shape.depth for _ in range(2))
        for parity in range(self.shape.directions):
            for seconds, found in ((self._seconds, compute), (self._busy, network)):
                for (op, layer, _), value in seconds.items():
                    if op == "H" and not self.shape.hops(layer):
                        continue
                    found[self.shape.stage_of(layer, parity)] += value / self.shape.directions
        return compute, network

    def update_seconds(self) -> float:
        """The optimizer's step on the fullest stage."""
        shard = self.job.choices.shard_optimizer
        shares = (self.layout.data, self.layout.replicas) if shard else (1, 1)
        trained = (self._trained(stage) for stage in range(self.shape.depth))
        return optimizer_seconds(self.job, max(dense / shares[0] + experts / shares[1] for dense, experts in trained))


def free_transfers(load: Load) -> Load:
    """The same load with transfers that take no time."""
    links = {op: replace(link, latency=0) for op, link in load.links.items()}
    return replace(load, bytes=lambda action: 0, links=links)


def _rate(link: PortLink) -> float:
    return link.gb_per_s * 1e9 * link.efficiency
