"""Everything that an estimate is made for: model, layout, cluster, batch and choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from lightning_afd.cost.hardware import Cluster, width_of
from lightning_afd.cost.model import ModelShape
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.schedule.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per parameter, and the dtype of the computation."""

    compute: str
    """dtype of matrix products, activations and messages."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """State of the optimizer: two moments for Adam."""

    @property
    def width(self) -> int:
        """Bytes of one activation between matrices, and of what F ranks get."""
        return width_of(self.compute)

    @property
    def stream_width(self) -> int:
        """Bytes of one number of the residual stream and of norms: under autocast that of the parameters."""
        return max(self.width, self.weight_bytes)


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "64": Precision(compute="float64", weight_bytes=8, gradient_bytes=8, optimizer_bytes=16),
        "32": Precision(compute="float32", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8),
        "bf16-mixed": Precision(compute="bfloat16", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8),
        "16-mixed": Precision(compute="float16", weight_bytes=4, gradient_bytes=4, optimizer_bytes=8),
        "bf16-true": Precision(compute="bfloat16", weight_bytes=2, gradient_bytes=2, optimizer_bytes=4),
    }
)
"""Those of the Trainer, with Adam in the parameters' dtype."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """One micro-batch of one A rank."""

    lengths: tuple[int, ...]
    """Tokens of each sequence; a packed row counts as its documents, which don't see one another."""

    @classmethod
    def rows(cls, rows: int, length: int) -> BatchShape:
        """So many sequences of one length."""
        return cls(lengths=(length,) * rows)

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What can be chosen beside the layout."""

    precision: Precision = PRECISIONS["bf16-mixed"]
    recompute: Literal["none", "attention", "full"] = "none"
    """What A ranks compute again in backward."""
    recompute_experts: bool = False
    """Whether F ranks keep only the inputs of experts."""
    shared_experts: Literal["attention", "ffn"] = "attention"
    """Role of the ranks that compute shared experts."""
    router_logits: bool = False
    """The loss needs the router logits of all layers (auxiliary loss)."""
    split_attention: bool = False
    """Weight gradients of attention segments are actions of their own (phase w), and not part of their backward."""
    shard_optimizer: bool = False
    """The A ranks of a group share out their optimizer state (ZeRO stage 1)."""
    dedup: Literal["rank", "node", "none"] = "rank"
    """A token travels once per F rank that it visits, once per node, or once per expert."""
    imbalance: float = 1.0
    """Rows of the busiest F rank over those of an even routing."""
    attention_nics: float = 1.0
    """NICs of an A rank, in units of an even share of the node's."""
    ffn_nics: float = 1.0
    """NICs of an F rank, likewise."""

    @property
    def options(self) -> dict[str, str]:
        """What a job is told, too, by the name of its option; values are those of `lightning-afd plan`."""
        names = (name for name, precision in PRECISIONS.items() if precision == self.precision)
        return {
            "precision": next(names, self.precision.compute),
            "dedup": self.dedup,
            "shared_experts": self.shared_experts,
            "optimizer_sharding": "torch or deepspeed" if self.shard_optimizer else "none",
        }


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job whose cost is asked for."""

    model: ModelShape
    layout: Layout
    cluster: Cluster
    batch: BatchShape
    micro_batches: int
    """Per step and A rank (R)."""
    choices: Choices = Choices()

    def __post_init__(self) -> None:
        moe = self.model.moe
        if not moe:
            raise PlanError("the model has no layer with routed experts: there is nothing to place on FFN ranks")
        fewest = min(layer.experts for layer in moe)
        if self.layout.ffn > fewest:
            raise PlanError(
                f"ffn={self.layout.ffn} ranks for {fewest} experts: each needs one, so choose a smaller ffn"
            )
        if self.layout.depth > len(moe):
            raise PlanError(f"groups={self.layout.depth} for {len(moe)} MoE layers: choose at most as many groups")
        if self.layout.world > self.cluster.devices:
            raise PlanError(
                f"{self.layout.describe()} are {self.layout.world} ranks, but the cluster has {self.cluster.devices} "
                "devices: choose fewer"
            )

    @cached_property
    def shape(self) -> Shape:
        """The size of a step, as schedules see it."""
        return Shape(
            layers=len(self.model.moe),
            groups=self.layout.depth,
            micro_batches=self.micro_batches,
            router_logits=self.choices.router_logits,
        )

    @property
    def shared_on_attention(self) -> bool:
        """Whether A ranks compute shared experts."""
        return self.choices.shared_experts == "attention"
