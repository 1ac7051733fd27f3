"""What a user may choose under every strategy, and how a job is trained in the end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from lightning_afd.model.recompute import CHOICES, Recompute
from lightning_afd.model.routing import CAPACITIES, Capacity
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import Layout, Sharding
from lightning_afd.strategies.nics import NicsOfRoles, checked_nics

Dedup = bool | Literal["node"]


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a job is trained in the end."""

    layout: Layout
    order: str
    """Order of the schedule, one of those that go with the layout."""
    micro_batches: int
    """Parts that each batch is cut into."""
    recompute: Recompute = "none"
    recompute_experts: bool = False
    group: int | Literal["auto"] = "auto"
    """Micro-batches of a run, where the plan has chosen them."""
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
    dedup: Dedup = True
    """Whether a token travels once to each rank that has experts for it, or once per expert (False), as in an
    all-to-all; "node": once to each node that has some, inside of which FFN ranks spread it."""
    capacity: Capacity = "counted"
    """"counted": only tokens travel that have to; "full": each one travels to every rank with experts, where it may
    find none of its own, so that no rank waits for its GPU to count rows."""
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
        check_choice("dedup", str(self.dedup), ("True", "node", "False"))
        check_choice("recompute", self.recompute, self.recompute_choices)
        check_choice("on_nonfinite", self.on_nonfinite, ("error", "skip"))
        check_choice("capacity", self.capacity, CAPACITIES)
        if self.capacity == "full" and self.dedup is not True:
            raise MisconfigurationException("capacity='full' sends each token once to every rank: use dedup=True")
        if self.micro_batches != "auto" and self.micro_batches < 1:
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

    def on_nodes(self, layout: Layout, ranks: int) -> Layout:
        """A layout on nodes of so many ranks: they matter where a token travels to each of them once, and only there,
        whatever the layout was made for.
        """
        spreads = self.dedup == "node" and not layout.collocated
        return replace(layout, node_ranks=ranks if spreads else 1)

    @property
    def sharding(self) -> Sharding:
        """How data replicas divide their optimizer state."""
        return "none"

    def choices(self, arrangement: Arrangement) -> dict[str, Any]:
        """The fields of a Plan that follow from the options, whatever the layout."""
        decided = ("order", "micro_batches", "recompute", "recompute_experts")
        own = {name: getattr(self, name) for name in ("capacity", "router_z_loss", "expert_bias_rate")}
        return own | {"dedup": bool(self.dedup)} | {name: getattr(arrangement, name) for name in decided}

    @property
    def recompute_choices(self) -> tuple[str, ...]:
        """What `recompute` may be."""
        return tuple(CHOICES)

    @property
    def again(self) -> dict[str, Any]:
        """What is computed again where no plan says more: nothing that is left open."""
        return {
            "recompute": "none" if self.recompute == "auto" else self.recompute,
            "recompute_experts": False if self.recompute_experts == "auto" else self.recompute_experts,
        }

    @property
    def plan_file(self) -> str | None:
        """Where a plan is to be taken from."""
        return None

    def needs_plan(self, world: int) -> bool:
        """Whether something is to be decided at the start of a fit."""
        return False

    def agreed(self) -> str:
        """What all ranks must have chosen alike beside the plan, since it says which collectives there are."""
        chosen = {name: getattr(self, name) for name in ("reduce_chunk_bytes", "trace", "on_nonfinite")}
        return ", ".join(f"{name}={value!r}" for name, value in {**chosen, "optimizer_sharding": self.sharding}.items())


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise MisconfigurationException for a value that is none of the choices."""
    if value not in choices:
        what = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise MisconfigurationException(f"{name}={value!r}: choose {what}")
