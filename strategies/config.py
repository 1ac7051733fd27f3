"""The options of the strategies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_afd.allocate.collocated import Prediction
from lightning_afd.allocate.request import Candidate
from lightning_afd.errors import PlanError
from lightning_afd.model.recompute import CHOICES, Recompute
from lightning_afd.model.shared import PLACES, SharedPlace
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import HEADS, NEIGHBOURS, SHARDINGS, Groups, Head, Layout, Neighbours, Sharding, as_groups
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import ORDERS, Knobs
from lightning_afd.schedule.together import TOGETHER_ORDERS
from lightning_afd.strategies.deepspeed_zero import check_installed
from lightning_afd.strategies.options import Arrangement, TrainingConfig, check_choice
from lightning_afd.strategies.planning.options import Planning
from lightning_afd.strategies.sizes import Open, Sizes


@dataclass(frozen=True, kw_only=True)
class AFDConfig(TrainingConfig):
    """Options of strategy afd; what is "auto" of the first four is planned at the start of a fit."""

    attention: int | Open = "auto"
    """A ranks per group: data-parallel replicas of attention and everything dense."""
    ffn: int | Open = "auto"
    """F ranks per group: the routed experts are divided over them."""
    groups: Groups | Open = "auto"
    """Interleaved groups of each role, or a pair: (attention groups, ffn groups)."""
    micro_batches: int | Open = "auto"  # type: ignore[assignment]
    """Parts that each batch is cut into; a batch with fewer rows uses fewer."""
    recompute: Recompute | Open = "auto"  # type: ignore[assignment]
    """As under other strategies; "auto": the least with which the plan fits into memory, without one "none"."""
    recompute_experts: bool | Open = "auto"  # type: ignore[assignment]
    """Whether only the inputs of experts are kept for backward; "auto" likewise."""
    plan: str = "auto"
    """"auto": measure and plan at the start of a fit what the options above leave open; a path: take it from that file
    of an earlier fit or of `lightning-afd plan`; "none": halves, one group and 4 micro-batches."""
    planning: Planning = field(default_factory=Planning)
    """How a plan is made."""
    head: Head = "attention"
    """Which ranks run what lies behind the last MoE layer (norm, head, loss): "attention" or "ffn"."""
    neighbours: Neighbours | Open = "auto"
    """Which ranks share a node, as launchers fill one node after another: "roles", attention ranks first, or "groups",
    both roles of group 0 in turn, then those of group 1; "auto": as the plan says, without one "roles".

    With "groups" each node has both roles, and part of what they send each other stays inside the node; with "roles"
    gradients of attention ranks are summed on as few nodes as possible.
    """
    order: str = "auto"
    """Order of the schedule: one of lightning_afd.schedule.orders.ORDERS; "auto": the plan's, or af-pipe."""
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
    optimizer_sharding: Sharding = "none"
    """Whether A ranks of a group divide their optimizer state: by parameters with torch's ZeroRedundancyOptimizer
    ("torch"), or in equal parts with ZeRO stage 1 of DeepSpeed ("deepspeed", an extra), for float32 parameters.

    Saves memory, not time; F ranks hold no expert twice and keep the plain optimizer. With "deepspeed" all ranks keep
    the state of a DeepSpeedCPUAdam in the host's memory.
    """
    fallback: Literal["collocated", "error"] = "collocated"
    """What happens where attention and ffn are left open and separate ranks make no sense, as on 1 rank or where the
    plan says so: every rank gets both roles (as under strategy flowmoe) and one line says why, or the job ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, ("auto", *ORDERS))
        check_choice("head", self.head, HEADS)
        check_choice("neighbours", self.neighbours, ("auto", *NEIGHBOURS))
        check_choice("shared_experts", self.shared_experts, PLACES)
        check_choice("optimizer_sharding", self.optimizer_sharding, SHARDINGS)
        if self.optimizer_sharding == "deepspeed":
            check_installed()
        check_choice("fallback", self.fallback, ("collocated", "error"))
        try:
            if self.groups != "auto":
                object.__setattr__(self, "groups", as_groups(self.groups))
        except PlanError as error:
            raise MisconfigurationException(str(error)) from None
        try:
            self.knobs.check(Layout(attention=1, ffn=1, groups=1 if self.groups == "auto" else self.groups))
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
    def sharding(self) -> Sharding:
        return self.optimizer_sharding

    def choices(self, arrangement: Arrangement) -> dict[str, Any]:
        splits = self.split_attention and arrangement.order == "zero-bubble" and arrangement.recompute == "none"
        knobs = self.knobs if self.micro_batch_group != "auto" else replace(self.knobs, group=arrangement.group)
        own = {"shared_experts": self.shared_experts, "knobs": knobs, "split_attention": splits}
        return super().choices(arrangement) | own

    @property
    def sizes(self) -> Sizes:
        """What is said about the layout."""
        return Sizes(
            attention=self.attention,
            ffn=self.ffn,
            groups=self.groups,
            head=self.head,
            neighbours="roles" if self.neighbours == "auto" else self.neighbours,
        )

    @property
    def recompute_choices(self) -> tuple[str, ...]:
        return "auto", *CHOICES

    @property
    def may_collocate(self) -> bool:
        """Whether ranks may have both roles: where both sizes are left open."""
        return self.attention == "auto" and self.ffn == "auto"

    @property
    def can_collocate(self) -> bool:
        """Whether no option is chosen that only separate ranks have."""
        chosen = self.groups not in ("auto", 1), self.head != "attention", self.shared_experts != "attention"
        also = self.dedup == "node", self.neighbours == "groups", self.optimizer_sharding != "none"
        return not any(chosen + also)

    def falls_back(self, disaggregate: bool) -> bool:
        """Whether separate ranks, which a plan finds worth it or not, are left: not where they are asked for."""
        acts = self.may_collocate and (self.can_collocate or self.fallback == "error")
        return acts and not disaggregate

    def allows(self, layout: Layout) -> bool:
        """Whether a run of micro-batches may be as short as the options say."""
        return self.micro_batch_group == "auto" or len(layout.workers()) <= self.micro_batch_group

    def planned(self, best: Candidate) -> Arrangement:
        """What a plan has chosen, where nothing else is given."""
        order = best.order if self.order == "auto" else self.order
        neighbours = best.layout.neighbours if self.neighbours == "auto" else self.neighbours
        return Arrangement(
            layout=replace(best.layout, head=self.head, neighbours=neighbours),
            order=order,
            micro_batches=self._cut(best.micro_batches),
            group=best.group if order == best.order else "auto",
            **self._again(best),
        )

    def _again(self, plan: Candidate | Prediction) -> dict[str, Any]:
        """What is computed again, by a plan where it is left open."""
        names = ("recompute", "recompute_experts")
        return {name: getattr(plan if getattr(self, name) == "auto" else self, name) for name in names}

    @property
    def plan_file(self) -> str | None:
        return None if self.plan in ("auto", "none") else self.plan

    def needs_plan(self, world: int) -> bool:
        """Whether something is to be decided at the start of a fit."""
        if self.plan_file is not None:
            return True
        is_open = self.micro_batches == "auto" or len(self.sizes.layouts(world)) > 1
        return self.plan == "auto" and world > 1 and is_open

    def arrange(self, world: int) -> Arrangement:
        """What a job with `world` ranks does by rule; raises MisconfigurationException where they do not fit."""
        if world == 1 and self.may_collocate and self.fallback == "collocated":
            return self.collocated(world, "1 rank cannot keep attention and experts apart, 2 or more can")
        order = "af-pipe" if self.order == "auto" else self.order
        return Arrangement(layout=self.sizes.layout(world), order=order, micro_batches=self._cut(), **self.again)

    def _cut(self, default: int = 4) -> int:
        return default if self.micro_batches == "auto" else self.micro_batches

    def collocated(self, world: int, reason: str, plan: Prediction | None = None) -> Arrangement:
        """The fallback; raises MisconfigurationException for options that only separate ranks have."""
        groups = 1 if self.groups == "auto" else self.groups
        try:
            layout = Layout(attention=world, ffn=world, groups=groups, head=self.head, collocated=True)
            if self.optimizer_sharding != "none" and world > 1:
                raise PlanError(f"a collocated layout cannot have optimizer_sharding={self.optimizer_sharding!r}")
        except PlanError as error:
            raise MisconfigurationException(f"strategy afd falls back ({reason}), but {error}") from None
        cut = self._cut() if plan is None or plan.micro_batches is None else self._cut(plan.micro_batches)
        again = self.again if plan is None else self._again(plan)
        return Arrangement(layout=layout, order="flowmoe", micro_batches=cut, reason=reason, **again)


@dataclass(frozen=True, kw_only=True)
class EPConfig(TrainingConfig):
    """Options of strategy ep: expert and data parallel on the same ranks."""

    micro_batches: int = 1
    """Parts that each batch is cut into; with 1 nothing overlaps."""
    order: str = "sequential"
    """Order of the schedule: one of lightning_afd.schedule.together.TOGETHER_ORDERS."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dedup == "node":
            raise MisconfigurationException(
                "dedup='node' on ranks that all have attention and experts: only the FFN ranks of strategy afd spread "
                "tokens inside their nodes, so use dedup=True here"
            )
        check_choice("order", self.order, TOGETHER_ORDERS)

    def arrange(self, world: int) -> Arrangement:
        """All ranks do the same."""
        cut = self.micro_batches
        return Arrangement(layout=Layout.together(world), order=self.order, micro_batches=cut, **self.again)


@dataclass(frozen=True, kw_only=True)
class FlowMoEConfig(EPConfig):
    """Options of strategy flowmoe: the same ranks, pipelined."""

    micro_batches: int = 4
    order: str = "flowmoe"
    """As under strategy ep."""
