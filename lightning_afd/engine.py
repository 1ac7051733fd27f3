"""One rank's engine: it agrees with the others on a step, runs its program of the schedule, and says how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_afd.attention_rank import AttentionRank
from lightning_afd.errors import PlanError
from lightning_afd.ffn_rank import FFNRank
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.port import Host, forbid, install
from lightning_afd.model.routing import Router
from lightning_afd.model.split import (
    MoELayer,
    find_moe_layers,
    keep_attention,
    keep_experts,
    mark_placed,
    placed_at,
)
from lightning_afd.placement import ExpertMap, Layout, Worker
from lightning_afd.runtime import Runtime
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.check import check
from lightning_afd.schedule.orders import build
from lightning_afd.schedule.passes import forward_only
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.segments import UserStep
from lightning_afd.timeline import exposed_share
from lightning_afd.transport.base import MAX_MICRO_BATCHES, Collectives, Transport
from lightning_afd.transport.link import Link


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that all ranks must agree on before the first step."""

    layout: Layout
    layers: int
    experts: tuple[int, ...]
    """Routed experts of each MoE layer."""
    order: str
    micro_batches: int

    def check(self) -> None:
        """Refuse what cannot run; raises PlanError with the numbers."""
        if self.layout.groups > 1:
            raise PlanError(f"groups={self.layout.groups}: only one group per role can be trained, use groups=1")
        if not 1 <= self.micro_batches <= MAX_MICRO_BATCHES:
            raise PlanError(f"micro_batches={self.micro_batches}: choose 1 to {MAX_MICRO_BATCHES}")
        fewest = min(self.experts)
        if self.layout.ffn > fewest:
            raise PlanError(
                f"ffn={self.layout.ffn} F ranks for {fewest} experts per layer: use ffn <= {fewest}, "
                "so that every F rank owns an expert of every layer"
            )


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
        self._transport = transport
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._step = 0
        self._undo: Callable[[], None] = lambda: None

    @property
    def is_attention(self) -> bool:
        return self.worker.role == "A"

    def place(self, root: nn.Module, layers: Sequence[MoELayer]) -> None:
        """Leave this rank only the parameters that it owns; the others go to the meta device under the same names.

        A model that was placed like this before stays as it is; raises PlanError where it was placed otherwise.
        """
        place = f"rank {self.rank} of {self.plan.layout.describe()}"
        before = placed_at(layers)
        if before is not None and before != place:
            raise PlanError(f"this model was split for {before} and cannot serve {place}: build a new one")
        if before is not None:
            return
        mark_placed(layers, place)
        if self.is_attention:
            keep_attention(layers)
        else:
            keep_experts(root, layers, self._expert_maps(), self.plan.layout.index_of(self.rank))

    def connect(self, layers: Sequence[MoELayer], device: torch.device) -> None:
        """Take the placed layers into service on `device`."""
        layout = self.plan.layout
        self.link = Link(self._transport, self.rank, device)
        peers = layout.ranks_of(Worker("F" if self.is_attention else "A", self.worker.group))
        if self.is_attention:
            host = Host()
            self._undo = install(host, layers)
            routers = [Router(expert_map, layout.ffn, device) for expert_map in self._expert_maps()]
            self._role: AttentionRank | FFNRank = AttentionRank(self.link, host, routers, peers)
        else:
            self._undo = forbid(layers)
            self._role = FFNRank(self.link, [ExpertShard(layer.experts) for layer in layers], peers)
        self.runtime = Runtime(self.rank, self.worker, self._role.handlers())

    def disconnect(self) -> None:
        """Give the layers their own forward back."""
        self._undo()

    def agree(self, micro_batches: int, total: float) -> Agreement:
        """Exchange what each A rank has for the coming step (F ranks pass zeros)."""
        everyone = self.collectives.all_gather([micro_batches, total])
        return Agreement(int(max(row[0] for row in everyone)), sum(row[1] for row in everyone))

    def run(self, steps: Sequence[UserStep], micro_batches: int, *, training: bool) -> list[Any]:
        """Run one step; returns what the user's steps returned (A ranks), in the order of the micro-batches."""
        program = self.program(micro_batches, training=training)
        self._step += 1
        self.link.begin(self._step)
        try:
            if isinstance(self._role, AttentionRank):
                self._role.begin(steps, micro_batches, training=training)
            else:
                self._role.begin(micro_batches, training=training)
            self.runtime.run(program)
            self.link.release()
            return self._role.results if isinstance(self._role, AttentionRank) else []
        finally:
            self._role.end()

    def program(self, micro_batches: int, *, training: bool) -> tuple[Action, ...]:
        """This rank's program, built and checked once per number of micro-batches."""
        return self.schedule(micro_batches, training=training).programs[self.worker]

    def schedule(self, micro_batches: int, *, training: bool) -> Schedule:
        key = (micro_batches, training)
        if key not in self._schedules:
            schedule = build(self.plan.order, Shape(layers=self.plan.layers, groups=1, micro_batches=micro_batches))
            schedule = schedule if training else forward_only(schedule)
            check(schedule)
            self._schedules[key] = schedule
        return self._schedules[key]

    @property
    def tokens(self) -> int:
        """Tokens that this rank brought to the last step; 0 on F ranks."""
        return self._role.tokens if isinstance(self._role, AttentionRank) else 0

    def exposed(self) -> float:
        """Share of the last step in which this rank waited for messages (0..1)."""
        return exposed_share(self.runtime.spans, self.worker.role)

    def _expert_maps(self) -> list[ExpertMap]:
        return [ExpertMap.contiguous(experts, self.plan.layout.ffn) for experts in self.plan.experts]


def make_plan(root: nn.Module, layout: Layout, *, order: str, micro_batches: int) -> tuple[Plan, tuple[MoELayer, ...]]:
    """Look at a whole model and say how it will be trained; raises PlanError for what cannot work."""
    layers = find_moe_layers(root)
    plan = Plan(
        layout=layout,
        layers=len(layers),
        experts=tuple(layer.num_experts for layer in layers),
        order=order,
        micro_batches=micro_batches,
    )
    plan.check()
    return plan, layers
