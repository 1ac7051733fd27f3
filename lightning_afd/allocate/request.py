"""What a plan is asked for, and what an answer looks like before it is a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import BatchShape, Choices, Job
from lightning_afd.cost.model import ModelShape
from lightning_afd.errors import PlanError
from lightning_afd.placement import NEIGHBOURS, Layout, Neighbours

Recompute = Literal["none", "attention", "full"]
Rung = tuple[Recompute, bool]
"""What is computed again: of attention, and of experts."""
RUNGS: tuple[Rung, ...] = (("none", False), ("attention", False), ("full", False), ("full", True))
"""Least first."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model to be trained on a cluster, with a batch that is the same for every layout."""

    model: ModelShape
    cluster: Cluster
    batch: BatchShape
    """One micro-batch of one data replica."""
    parts: int
    """Micro-batches of all replicas per optimizer step together."""
    choices: Choices = field(default_factory=Choices)
    rungs: tuple[Rung, ...] = RUNGS
    """Recomputation that is allowed; the first that fits is used, as it is the fastest."""
    groups: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of groups per role that are tried."""
    orders: tuple[str, ...] = ("af-pipe", "zero-bubble")
    """Orders that are tried."""
    layouts: tuple[Layout, ...] = ()
    """The only ones that are allowed; empty: all of these groups that the cluster has room for."""
    neighbours: tuple[Neighbours, ...] = NEIGHBOURS
    """Ways to lay the ranks of a layout on nodes that are tried where there are several nodes."""

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise PlanError(f"{self.parts} micro-batches per step: at least 1 is needed")
        if self.cluster.devices < 2:
            raise PlanError("attention and experts on separate devices need 2, but the cluster has 1")

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.parts * self.batch.tokens

    def per_replica(self, replicas: int) -> int:
        """Micro-batches of the busiest replica per optimizer step."""
        return -(-self.parts // replicas)

    def job(self, layout: Layout, micro_batches: int, rung: Rung) -> Job:
        """The job of one pass of the pipeline."""
        return Job(
            model=self.model,
            layout=layout,
            cluster=self.cluster,
            batch=self.batch,
            micro_batches=micro_batches,
            choices=replace(self.choices, recompute=rung[0], recompute_experts=rung[1]),
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a step."""

    layout: Layout
    order: str
    """Of the schedule."""
    group: int
    """Micro-batches that pass a round of the ring one behind the other (G), at most."""
    micro_batches: int
    """Of one pass (R)."""
    passes: int
    """Passes of the pipeline per optimizer step (accumulate_grad_batches)."""
    recompute: Recompute
    """Of attention."""
    recompute_experts: bool
    """Whether F ranks keep only the inputs of experts."""
    formula_seconds: float
    """Of an optimizer step, by the closed formula."""
    bound_seconds: float
    """Busy seconds per step of the busiest part: no order can be faster."""
    memory_bytes: float
    """Of the fullest rank."""
    simulated_seconds: float | None = None
    """Of an optimizer step, by the simulator; None where the formula was too slow to try it."""

    @property
    def seconds(self) -> float:
        """The best prediction there is."""
        return self.formula_seconds if self.simulated_seconds is None else self.simulated_seconds

    @property
    def rung(self) -> Rung:
        """Both kinds of recomputation."""
        return self.recompute, self.recompute_experts

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Fastest first; ties go to fewest devices, then to the most slack, then to fewest groups and A ranks."""
        layout = self.layout
        return self.seconds, layout.world, self.bound_seconds, layout.depth, layout.attention, self.group
