"""The options of the strategies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from lightning_afd.errors import PlanError
from lightning_afd.model.recompute import CHOICES, Recompute
from lightning_afd.model.shared import PLACES, SharedPlace
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import HEADS, NEIGHBOURS, Grouped, Groups, Head, Layout, Neighbours, as_groups
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import ORDERS, Knobs
from lightning_afd.schedule.together import TOGETHER_ORDERS
from lightning_afd.strategies.nics import NicsOfRoles, checked_nics


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a job is trained in the end."""

    layout: Layout
    order: str
    """Order of the schedule, one of those that go with the layout."""
    reason: str = ""
    """Why the layout is another one than the strategy's name says."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a user may choose under every strategy."""

    micro_batches: int = 4
    """Parts that each batch is cut into; a batch with fewer rows uses fewer."""
    recompute: Recompute = "none"
    """What ranks compute again of attention in backward: "none", "attention" (all but experts and routers) or "full"
    layers."""
    recompute_experts: bool = False
    """Whether only the inputs of experts are kept for backward."""
    dedup: bool = True
    """Whether a token travels once to each rank that has experts for it, or once per expert, as in an all-to-all."""
    expert_bias_rate: float = 0.0
    """By how much the bias of each expert moves after an optimizer step, against its load; 0 leaves it alone.

    For models that have one (e_score_correction_bias of DeepSeek-V3, whose authors took 1e-3). Loads are the tokens of
    all A ranks and micro-batches of the step; a step that nobody makes moves nothing. Biases are float32 then.
    """
    router_z_loss: float = 0.0
    """Coefficient of the router z-loss (ST-MoE, 1e-3 there) that is added to the loss of each micro-batch; 0: none.

    The mean over the tokens of log(sum(exp(router logits)))^2, summed over the MoE layers.
    """
    on_nonfinite: Literal["error", "skip"] = "error"
    """A gradient that is not finite on any rank ends the job and is named, or nobody makes the step.

    Under a loss scaler (precision "16-mixed") the scaler decides: nobody makes the step, and the scale falls.
    """
    trace: int = 0
    """Every how many optimizer steps one is recorded: what every rank did when, and what explains it; 0: none."""
    trace_dir: str = "auto"
    """Folder of the recordings; "auto" is trace/ in the logger's folder, or in default_root_dir without a logger."""
    reduce_chunk_bytes: int | Literal["auto"] | None = None
    """S_p: dense gradients of attention ranks are summed in chunks of so many bytes, while the step still runs.

    "auto" tunes it over the first steps of a fit, by step times alone; None sums them at the end of the step. The
    gradients are the same but for rounding: with three or more attention ranks per group, the order in which a sum adds
    its terms depends on the size of a message, so that a tuned job is not repeated bit for bit.
    """
    nics: NicsOfRoles | Literal["auto"] | None = "auto"
    """Names of the NICs of each role on every node, {"A": ["mlx5_0"], "F": ["mlx5_1", "mlx5_2"]}, which ranks of that
    role divide among themselves; "auto" divides a node's NICs as the plan says, if it gives one role more of them.

    Variables of NCCL and gloo that are set (NCCL_IB_HCA, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) hold instead, and None
    sets none.
    """
    weights_only: bool = True
    """Whether checkpoints may hold tensors and plain values only; False unpickles whatever their writer put in."""
    timeout: timedelta = timedelta(minutes=10)
    """How long a rank waits for a message before it gives up."""

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, CHOICES)
        check_choice("on_nonfinite", self.on_nonfinite, ("error", "skip"))
        if self.micro_batches < 1:
            raise MisconfigurationException(f"micro_batches={self.micro_batches}: at least 1 is needed")
        if self.trace < 0:
            raise MisconfigurationException(
                f"trace={self.trace}: choose 0 (off) or every how many steps one is recorded"
            )
        checked_nics(self.nics)
        if self.reduce_chunk_bytes not in (None, "auto") and self.reduce_chunk_bytes < 1:
            raise MisconfigurationException(
                f"reduce_chunk_bytes={self.reduce_chunk_bytes}: choose 'auto', None or a number of bytes from 1 on"
            )

    @property
    def divides_optimizers(self) -> bool:
        """Whether data replicas divide their optimizer state."""
        return False

    def choices(self, order: str) -> dict[str, Any]:
        """The fields of a Plan that follow from the options, whatever the layout; `order` is that of the job."""
        names = ("micro_batches", "recompute", "recompute_experts", "dedup", "router_z_loss", "expert_bias_rate")
        return {"order": order, **{name: getattr(self, name) for name in names}}

    def agreed(self) -> str:
        """What all ranks must have chosen alike beside the plan."""
        return f"reduce_chunk_bytes={self.reduce_chunk_bytes!r}, trace={self.trace}"


@dataclass(frozen=True, kw_only=True)
class AFDConfig(TrainingConfig, Grouped):
    """Options of strategy afd; the defaults divide the world in two equal halves."""

    attention: int | Literal["auto"] = "auto"
    """A ranks per group: data-parallel replicas of attention and everything dense."""
    ffn: int | Literal["auto"] = "auto"
    """F ranks per group: the routed experts are divided over them."""
    groups: Groups = 1
    """Interleaved groups of each role, or a pair: (attention groups, ffn groups)."""
    head: Head = "attention"
    """Which ranks run what lies behind the last MoE layer (norm, head, loss): "attention" or "ffn"."""
    neighbours: Neighbours = "roles"
    """Which ranks share a node, as launchers fill one node after another: "roles", attention ranks first, or "groups",
    both roles of group 0 in turn, then those of group 1.

    With "groups" each node has both roles, and part of what they send each other stays inside the node; with "roles"
    gradients of attention ranks are summed on as few nodes as possible.
    """
    order: str = "af-pipe"
    """Order of the schedule: one of lightning_afd.schedule.orders.ORDERS."""
    micro_batch_group: int | Literal["auto"] = "auto"
    """Micro-batches that pass the groups of both roles one behind the other (af-pipe, zero-bubble): at least as many
    as there are groups, 2 * groups or the sum of the pair.

    "auto" is as near to twice that as micro_batches allows; fewer hold less, more hide longer transfers.
    """
    pending_weight_gradients: int = 8
    """Weight gradients that zero-bubble puts off on one rank, at most; each holds the activations of a layer."""
    pace: Pace = field(default_factory=Pace)
    """How long zero-bubble takes actions and transfers to last; at another pace it finds fewer gaps, never errors."""
    split_attention: bool = True
    """Whether zero-bubble puts off weight gradients of attention ranks, too, and not only those of experts.

    Nothing is put off where segments are computed again in backward (recompute), as that would be done twice.
    """
    shared_experts: SharedPlace = "attention"
    """Where experts that all tokens visit are computed: on "attention" ranks, or on "ffn" ranks beside the routed ones.

    On "ffn" each token's are computed by one of the F ranks that it visits, and every F rank of a group holds them.
    """
    optimizer_sharding: Literal["none", "torch"] = "none"
    """Whether A ranks of a group divide their optimizer state by parameters, with torch's ZeroRedundancyOptimizer.

    Saves memory, not time; F ranks hold no expert twice and keep the plain optimizer.
    """
    fallback: Literal["collocated", "error"] = "collocated"
    """What happens where attention and ffn are left open and separate ranks make no sense, as on 1 rank: every rank
    gets both roles (as under strategy flowmoe), with one line that says so, or the job ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, ORDERS)
        check_choice("head", self.head, HEADS)
        check_choice("neighbours", self.neighbours, NEIGHBOURS)
        check_choice("shared_experts", self.shared_experts, PLACES)
        check_choice("optimizer_sharding", self.optimizer_sharding, ("none", "torch"))
        check_choice("fallback", self.fallback, ("collocated", "error"))
        try:
            object.__setattr__(self, "groups", as_groups(self.groups))
        except PlanError as error:
            raise MisconfigurationException(str(error)) from None
        try:
            self.knobs.check(self)
        except PlanError as error:
            raise MisconfigurationException(
                f"micro_batch_group={self.micro_batch_group!r} with "
                f"pending_weight_gradients={self.pending_weight_gradients}: {error}"
            ) from None

    @property
    def knobs(self) -> Knobs:
        """What the order leaves open."""
        return Knobs(group=self.micro_batch_group, pending=self.pending_weight_gradients, pace=self.pace)

    @property
    def divides_optimizers(self) -> bool:
        return self.optimizer_sharding == "torch"

    def choices(self, order: str) -> dict[str, Any]:
        splits = self.split_attention and order == "zero-bubble" and self.recompute == "none"
        own = {"shared_experts": self.shared_experts, "knobs": self.knobs, "split_attention": splits}
        return super().choices(order) | own

    def arrange(self, world: int) -> Arrangement:
        """What a job with `world` ranks does; raises MisconfigurationException where they do not fit."""
        is_open = self.attention == "auto" and self.ffn == "auto"
        if world == 1 and is_open and self.fallback == "collocated":
            return self.collocated(world, "1 rank cannot keep attention and experts apart, 2 or more can")
        return Arrangement(layout=self.layout(world), order=self.order)

    def collocated(self, world: int, reason: str) -> Arrangement:
        """The fallback; raises MisconfigurationException for options that only separate ranks have."""
        try:
            layout = Layout(attention=world, ffn=world, groups=self.groups, head=self.head, collocated=True)
            if self.optimizer_sharding != "none" and world > 1:
                raise PlanError(f"a collocated layout cannot have optimizer_sharding={self.optimizer_sharding!r}")
        except PlanError as error:
            raise MisconfigurationException(f"strategy afd falls back ({reason}), but {error}") from None
        return Arrangement(layout=layout, order="flowmoe", reason=reason)

    def layout(self, world: int) -> Layout:
        """The layout of a job with `world` ranks; raises MisconfigurationException where they do not fit."""
        attention, ffn = self._sizes(world)
        try:
            layout = Layout(
                attention=attention, ffn=ffn, groups=self.groups, head=self.head, neighbours=self.neighbours
            )
        except PlanError as error:
            raise MisconfigurationException(str(error)) from None
        if layout.world != world:
            raise MisconfigurationException(
                f"strategy afd with attention={attention}, ffn={ffn}, groups={self.groups} needs "
                f"{layout.world} ranks ({layout.describe()}), but the Trainer has {world} (devices x num_nodes): "
                f"set devices={layout.world}, or choose attention and ffn so that {self._sum} = {world}"
            )
        return layout

    def _sizes(self, world: int) -> tuple[int, int]:
        """Attention and ffn ranks per group; what is left to choose gets the rest, or an equal half."""
        if world < 2:
            raise MisconfigurationException(
                f"strategy afd needs at least 2 ranks, one for attention and one for experts, but the Trainer has "
                f"{world}: set devices=2 or more (on CPU, devices='auto' is 1)"
            )
        a, f = self.attention_groups, self.ffn_groups
        if self.attention == "auto" and self.ffn == "auto":
            if world % 2 or world // 2 % a or world // 2 % f:
                raise MisconfigurationException(
                    f"strategy afd cannot divide {world} ranks into equal halves of {self.groups} group(s): "
                    "set attention and ffn, for example AFDStrategy(attention=2, ffn=1)"
                )
            return world // 2 // a, world // 2 // f
        if self.attention == "auto":
            assert self.ffn != "auto"
            return (world - f * self.ffn) // a, self.ffn
        return self.attention, (world - a * self.attention) // f if self.ffn == "auto" else self.ffn

    @property
    def _sum(self) -> str:
        """How many ranks there are, as a formula."""
        if isinstance(self.groups, int):
            return "groups * (attention + ffn)"
        return f"{self.attention_groups} * attention + {self.ffn_groups} * ffn"


@dataclass(frozen=True, kw_only=True)
class EPConfig(TrainingConfig):
    """Options of strategy ep: expert and data parallel on the same ranks."""

    micro_batches: int = 1
    order: str = "sequential"
    """Order of the schedule: one of lightning_afd.schedule.together.TOGETHER_ORDERS."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, TOGETHER_ORDERS)

    def arrange(self, world: int) -> Arrangement:
        """All ranks do the same."""
        return Arrangement(layout=Layout.together(world), order=self.order)


@dataclass(frozen=True, kw_only=True)
class FlowMoEConfig(EPConfig):
    """Options of strategy flowmoe: the same ranks, pipelined."""

    micro_batches: int = 4
    order: str = "flowmoe"


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise MisconfigurationException for a value that is none of the choices."""
    if value not in choices:
        what = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise MisconfigurationException(f"{name}={value!r}: choose {what}")
