"""What all ranks must agree on before they split a model: a plain value, made by looking at the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.model.recompute import Recompute
from lightning_afd.model.routing import CAPACITIES, Capacity
from lightning_afd.model.shared import SharedPlace
from lightning_afd.model.split import MoELayer, find_moe_layers, wants_router_logits, with_shared_experts
from lightning_afd.placement import Layout
from lightning_afd.schedule.orders import ORDERS, Knobs
from lightning_afd.schedule.shape import Shape
from lightning_afd.schedule.together import TOGETHER_ORDERS
from lightning_afd.transport.base import MAX_MICRO_BATCHES


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that all ranks must agree on before the first step."""

    layout: Layout
    layers: int
    experts: tuple[int, ...]
    """Routed experts of each MoE layer."""
    order: str
    micro_batches: int
    knobs: Knobs = field(default_factory=Knobs)
    """What the order leaves open."""
    split_attention: bool = False
    """Whether weight gradients of attention segments are actions of their own, apart from input gradients."""
    recompute: Recompute = "none"
    """What A ranks compute again in backward."""
    recompute_experts: bool = False
    """Whether F ranks keep only the inputs of their experts for backward."""
    shared_experts: SharedPlace = "attention"
    """Which ranks compute shared experts: each A rank those of its tokens, or F ranks beside the routed ones."""
    dedup: bool = True
    """Whether a token is sent once to each F rank that it visits, or once per expert."""
    capacity: Capacity = "counted"
    """Whether only tokens travel that have to, which must be counted, or each one to every F rank ("full")."""
    router_z_loss: float = 0.0
    """Coefficient of the router z-loss of every MoE layer."""
    expert_bias_rate: float = 0.0
    """By how much the biases of experts move after each optimizer step."""
    router_logits: bool = False
    """Whether the loss needs router logits that are computed on other ranks than the tail."""

    def shape(self, micro_batches: int) -> Shape:
        """The shape of a step with so many micro-batches."""
        return Shape(
            layers=self.layers,
            groups=self.layout.groups,
            micro_batches=micro_batches,
            router_logits=self.router_logits,
            head=self.layout.head,
            split_attention=self.split_attention,
            spreads=self.layout.spreads,
        )

    def expert_maps(self) -> list[ExpertMap]:
        """Owner of each expert, per MoE layer."""
        return [ExpertMap.contiguous(experts, self.layout.ffn) for experts in self.experts]

    def check(self) -> None:
        """Refuse what cannot run; raises PlanError with the numbers."""
        if not 1 <= self.micro_batches <= MAX_MICRO_BATCHES:
            raise PlanError(f"micro_batches={self.micro_batches}: choose 1 to {MAX_MICRO_BATCHES}")
        for name in ("router_z_loss", "expert_bias_rate"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise PlanError(f"{name}={getattr(self, name)}: choose 0 (off) or a positive number")
        if self.capacity not in CAPACITIES:
            raise PlanError(f"capacity={self.capacity!r}: choose {' or '.join(map(repr, CAPACITIES))}")
        if self.capacity == "full" and not self.dedup:
            raise PlanError("capacity='full' sends each token once to every F rank: use dedup=True")
        self.knobs.check(self.layout)
        self._check_layout()
        fewest = min(self.experts)
        if self.layout.ffn > fewest:
            ranks, most = (f"ffn={self.layout.ffn} F ranks", f"ffn <= {fewest}")
            if self.layout.collocated:
                ranks, most = self.layout.describe() + " ranks", f"{fewest} ranks at most"
            raise PlanError(
                f"{ranks} for {fewest} experts per layer: use {most}, so that each owns an expert of every layer"
            )
        if self.shared_experts == "ffn" and self.layout.has_ranks_without_tail():
            raise PlanError(
                f"head='ffn' with shared_experts='ffn' needs a tail on every F rank, but ffn={self.layout.ffn} is more "
                f"than attention={self.layout.attention}: leave one of the two on attention ranks"
            )

    def _check_layout(self) -> None:
        """Refuse what does not go with the layout."""
        orders = TOGETHER_ORDERS if self.layout.collocated else ORDERS
        if self.order not in orders:
            raise PlanError(f"order={self.order!r} on {self.layout.describe()}: choose one of {', '.join(orders)}")
        if self.layout.collocated and self.shared_experts == "ffn":
            raise PlanError(
                "shared_experts='ffn' on a collocated layout, whose ranks all compute attention: leave them there, as "
                "each rank computes those of its own tokens"
            )
        if self.shared_experts == "ffn" and not self.dedup:
            raise PlanError(
                "dedup=False with shared_experts='ffn', which are computed on one of the copies of a token: use "
                "dedup=True or leave shared experts on attention ranks"
            )


def make_plan(root: nn.Module, layout: Layout, **choices: Any) -> tuple[Plan, tuple[MoELayer, ...]]:
    """Look at a whole model and say how it will be trained; `choices` are the other fields of Plan (order ...).

    Raises PlanError for what cannot work.
    """
    layers = find_moe_layers(root)
    plan = Plan(
        layout=layout,
        layers=len(layers),
        experts=tuple(layer.num_experts for layer in layers),
        **choices,
        router_logits=(layout.attention_groups > 1 or layout.head == "ffn") and wants_router_logits(root),
    )
    plan.check()
    return plan, with_shared_experts(root, layers) if plan.shared_experts == "ffn" else layers
