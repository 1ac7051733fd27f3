"""One rank's engine: it agrees with the others on a step, runs its program of the schedule, and says how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_afd.attention_rank import AttentionRank
from lightning_afd.expert_load import ExpertCounts
from lightning_afd.expert_map import ExpertMap
from lightning_afd.ffn_rank import FFNRank
from lightning_afd.model.coroutine import Host
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.place import segments_of_dense, stub_embeddings
from lightning_afd.model.port import Cut, forbid, install
from lightning_afd.model.routing import FullRouter, NodeRouter, Router
from lightning_afd.model.shared import WithShared
from lightning_afd.model.split import DecoderLayer, MoELayer, decoder_layers
from lightning_afd.node_relay import NodeFFNRank
from lightning_afd.owned import Owned
from lightning_afd.peers import Peers
from lightning_afd.placement import Role, Worker
from lightning_afd.plan import Plan
from lightning_afd.receives import Expected, Receives
from lightning_afd.reduction import ChunkedSum
from lightning_afd.runtime import Handlers, Runtime
from lightning_afd.schedule.actions import Step
from lightning_afd.schedule.passes import with_places
from lightning_afd.schedule.programs import Programs, evaluation_programs_of, programs_of
from lightning_afd.segments import UserStep
from lightning_afd.tail_rank import TailRank
from lightning_afd.timeline import exposed_share
from lightning_afd.transport.announced import link_of
from lightning_afd.transport.base import Collectives, Transport


@dataclass(frozen=True)
class Agreement:
    """What all A ranks together bring to one step."""

    micro_batches: int
    """Micro-batches of the step: the most that any A rank has."""
    total: float
    """Sum of the loss weights (valid tokens or samples) of all micro-batches of all A ranks."""


class Engine:
    """The split model of one rank, its messages and its schedules."""

    def __init__(self, plan: Plan, rank: int, transport: Transport, collectives: Collectives) -> None:
        self.plan = plan
        self.rank = rank
        self.worker: Worker = plan.layout.worker_of(rank)
        self.collectives = collectives
        self.runtime: Runtime
        self.attention: AttentionRank | None
        """This rank's attention; None on F ranks."""
        self.experts: FFNRank | None
        """This rank's experts, and tails of others; None on ranks without."""
        self.expert_counts: ExpertCounts
        self.device = torch.device("cpu")
        self.executed: Programs
        """What all ranks have executed in the last step, without places for chunks of gradients."""
        self._transport = transport
        self._programs: dict[tuple[int, bool], Programs] = {}
        self._with_places: dict[int, tuple[Step, ...]] = {}
        self._expected: dict[tuple[int, bool], Expected] = {}
        self.sums: ChunkedSum | None = None
        """Sums dense gradients during a step, on A ranks that are not alone in their group."""
        self._step = 0
        self.seed = 0
        """Seed of the job, that of rank 0."""
        self._undo: list[Callable[[], None]] = []
        self._peers = Peers(plan.layout, plan.shape(1), rank)
        self._owned = Owned(plan, rank, collectives)

    @property
    def is_attention(self) -> bool:
        """Whether this rank has attention, and so users' steps and data."""
        return self.worker.role == "A"

    @property
    def has_experts(self) -> bool:
        """Whether this rank has routed experts; on a collocated layout it has both."""
        return not self.is_attention or self.plan.layout.collocated

    @property
    def has_tail(self) -> bool:
        """Whether users' steps run to their end on this rank."""
        return bool(self.replicas_of_tails)

    @property
    def replicas_of_tails(self) -> tuple[int, ...]:
        """The data replicas whose steps run to their end on this rank."""
        return self.plan.layout.tails_of(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the data of its replica: on A group 0."""
        return self.worker == Worker("A", 0)

    def place(self, root: nn.Module, layers: Sequence[MoELayer]) -> None:
        """Leave this rank only the parameters that it owns (Owned.place)."""
        self._owned.place(root, layers)

    def materialise(self, root: nn.Module, layers: Sequence[MoELayer], device: torch.device) -> None:
        """Collective: give what this rank owns and was made on the meta device its first values (Owned.materialise)."""
        seed = self.collectives.broadcast_object(torch.initial_seed(), 0)
        assert isinstance(seed, int)
        self.seed = seed
        self._owned.materialise(root, layers, device, seed)

    def connect(self, root: nn.Module, layers: Sequence[MoELayer], device: torch.device) -> None:
        """Take the placed layers into service on `device`."""
        self.device = device
        self.link = link_of(self._transport, self.rank, device)
        self.expert_counts = ExpertCounts(self.plan.experts, device)
        self.expert_counts.enabled = self.plan.expert_bias_rate > 0
        decoder = decoder_layers(root, layers)
        if not (self.is_attention or self.has_tail):
            self._undo.append(forbid(decoder))
        host = self._install(root, decoder) if self.is_attention or self.has_tail else Host()
        self.attention = self._attention_role(layers, host, device) if self.is_attention else None
        self.experts = self._experts_role(layers, host) if self.has_experts else None
        if self.is_attention and len(self.plan.layout.copies_of(self.rank)) > 1:
            self.sums = ChunkedSum(segments_of_dense(root, decoder), self.collectives)
        self.runtime = Runtime(self.rank, self._tables())
        if self.sums is not None:
            self.sums.meter = self.runtime
        if self.attention is not None:
            self.runtime.would_wait = self.attention.would_wait

    def _tables(self) -> dict[Worker, Handlers]:
        """What this rank does for each action, as each of its workers."""
        sums = {} if self.sums is None else self.sums.handlers()
        attention = {} if self.attention is None else self.attention.handlers()
        experts = {} if self.experts is None else self.experts.handlers()
        by_role: dict[Role, Handlers] = {"A": {**attention, **sums}, "F": experts}
        return {worker: by_role[worker.role] for worker in self.plan.layout.workers_of(self.rank)}

    def _attention_role(self, layers: Sequence[MoELayer], host: Host, device: torch.device) -> AttentionRank:
        router = FullRouter if self.plan.capacity == "full" else Router
        maps, dedup = self.expert_maps(), self.plan.dedup
        routers: dict[int, Router] = {}
        for index in self._peers.layers:
            nodes, shared = self._peers.nodes_of(index), layers[index].shared is not None
            routers[index] = router(maps[index].joined(nodes), len(nodes), device, shared=shared, dedup=dedup)
        return AttentionRank(self.link, host, routers, self._peers, self.expert_counts)

    def _experts_role(self, layers: Sequence[MoELayer], host: Host) -> FFNRank:
        shards = {index: self._shard(layers[index]) for index in self._peers.layers}
        tails = TailRank(self.link, host, self._peers)
        if not self.plan.layout.spreads:
            return FFNRank(self.link, shards, self._peers, tails)
        maps, node = self.expert_maps(), self._peers.node
        routers = {}
        for index in self._peers.layers:
            shared = layers[index].shared is not None
            routers[index] = NodeRouter(maps[index].within(node), len(node), self.device, shared=shared)
        return NodeFFNRank(self.link, shards, self._peers, tails, routers)

    def _shard(self, layer: MoELayer) -> ExpertShard | WithShared:
        again = self.plan.recompute_experts
        shard = ExpertShard(layer.experts, recompute=again)
        return shard if layer.shared is None else WithShared(shard, layer.shared.module, recompute=again)

    def _install(self, root: nn.Module, decoder: Sequence[DecoderLayer]) -> Host:
        """Cut the layers of a rank that runs user code."""
        layout = self.plan.layout
        several = layout.attention_groups > 1
        cut = Cut(
            host=Host(),
            segments=self._peers.owned_segments,
            may_suspend_inside=self.is_attention and not several,
            only_hidden=several or layout.head == "ffn",
            stands_in=self.has_tail and (several or layout.head == "ffn"),
            recompute=self.plan.recompute,
        )
        self._undo += [install(cut, decoder), stub_embeddings(root)]
        return cut.host

    def disconnect(self) -> None:
        """Give the layers their own forward back."""
        for undo in self._undo:
            undo()
        self._undo = []

    def agree(self, micro_batches: int, total: float) -> Agreement:
        """Exchange what each A rank has for the coming step (F ranks pass zeros)."""
        everyone = self.collectives.all_gather([micro_batches, total])
        return Agreement(int(max(row[0] for row in everyone)), sum(row[1] for row in everyone))

    def run(
        self,
        steps: Sequence[UserStep],
        micro_batches: int,
        *,
        training: bool,
        tails: Sequence[Sequence[UserStep]] = (),
    ) -> list[Any]:
        """Run one step; returns what the user's steps returned (A ranks), in the order of the micro-batches.

        An A rank brings `steps`; an F rank brings in `tails` those of each replica whose tail it runs, and finds in
        `tail_results` what they returned.
        """
        self.executed = self.programs(micro_batches, training=training)
        program = self.program(micro_batches, training=training)
        self._step += 1
        self.link.begin(self._step)
        receives = Receives(self.link, self._peers, self._expects(micro_batches, training=training))
        try:
            if self.attention is not None:
                self.attention.begin(steps, micro_batches, receives, training=training)
            if self.experts is not None:
                self.experts.begin(receives, training=training)
                self.experts.tails.begin(tails, micro_batches, receives, training=training)
            self.runtime.run(program)
            self.link.release()
            if self.attention is not None:
                self.attention.settle()
            return [] if self.attention is None else self.attention.results
        finally:
            for role in (self.attention, self.experts):
                if role is not None:
                    role.end()

    def repeat(self) -> None:
        """The next step gets the number of the last one, whose messages it will find."""
        self._step -= 1

    @property
    def tail_results(self) -> list[list[Any]]:
        """What the steps in `tails` returned on an F rank, by replica and micro-batch; nothing on A ranks."""
        return [] if self.experts is None else self.experts.tails.results

    def programs(self, micro_batches: int, *, training: bool) -> Programs:
        """What all ranks execute, built and checked once per number of micro-batches."""
        key = (micro_batches, training)
        if key not in self._programs:
            of = programs_of if training else evaluation_programs_of
            shape = self.plan.shape(micro_batches)
            self._programs[key] = of(self.plan.layout, self.plan.order, shape, self.plan.knobs)
        return self._programs[key]

    def program(self, micro_batches: int, *, training: bool) -> tuple[Step, ...]:
        """What this rank executes, with places for chunks of gradients where it sums them on the way."""
        programs = self.programs(micro_batches, training=training)
        program = programs.by_worker[self.worker]
        if not training or self.sums is None or not self.sums.active:
            return program
        if micro_batches not in self._with_places:
            self._with_places[micro_batches] = with_places(programs.schedule.shape, program)
        return self._with_places[micro_batches]

    def _expects(self, micro_batches: int, *, training: bool) -> Expected:
        """What comes to this rank; places for chunks of gradients change nothing about it."""
        key = (micro_batches, training)
        if key not in self._expected:
            self._expected[key] = Expected(self._peers, self.program(micro_batches, training=training))
        return self._expected[key]

    @property
    def tokens(self) -> int:
        """Tokens that this rank brought to the last step; 0 on F ranks."""
        return 0 if self.attention is None else self.attention.tokens

    @property
    def kernels(self) -> frozenset[str]:
        """What has multiplied rows of experts on this rank; nothing on ranks without any."""
        return frozenset() if self.experts is None else self.experts.kernels

    def z_loss(self) -> float:
        """What this rank's layers and micro-batches add to the z-loss of the global batch; 0 on F ranks."""
        losses = [] if self.attention is None else self.attention.z_losses
        return float(torch.stack(losses).sum()) if losses else 0.0

    def exposed(self) -> float:
        """Share of the last step in which this rank waited for messages (0..1)."""
        return exposed_share(self.runtime.spans, self.worker.role)

    def expert_maps(self) -> list[ExpertMap]:
        """Owner of each expert, per MoE layer."""
        return self.plan.expert_maps()
