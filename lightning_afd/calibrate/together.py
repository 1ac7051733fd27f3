"""Make the cost model true on the ranks at hand: run parts of the user's model on them, and messages between them.

Every rank computes at the same time, as in training, and the slowest one counts; one rank of each node computes alone
as well, which shows what ranks that share cores (or memory, or power) take from one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_afd.allocate.calibration import Calibration
from lightning_afd.calibrate.compute import Bench
from lightning_afd.calibrate.handling import measure_handling
from lightning_afd.calibrate.links import GroupMail, Mail, far_peer, measure_pair, near_peer
from lightning_afd.calibrate.setting import Setting
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices
from lightning_afd.cost.measured import Figures, Handled, Points, Sample, measured_cluster
from lightning_afd.model.sample import sample_of
from lightning_afd.placement import Layout

Progress = Callable[[str, float], None]
"""What is measured next, and the share (0..1) of everything that is done."""


@dataclass(frozen=True, kw_only=True)
class RankLinks:
    """What a rank needs to measure together with the others."""

    rank: int
    world: int
    nodes: tuple[int, ...]
    """The node of each rank."""
    device: torch.device
    gather: Callable[[Any], list[Any]]
    """Collective: every rank's value, by rank, on every rank. It also makes ranks wait for one another."""
    mail: Mail
    """Messages to other ranks."""
    now: Callable[[], float] = time.perf_counter

    @classmethod
    def over_default_group(cls, nodes: Sequence[int], device: torch.device) -> RankLinks:
        """Over the default group of torch.distributed, gloo or NCCL."""
        rank, world = dist.get_rank(), dist.get_world_size()

        def gather(value: Any) -> list[Any]:
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, value)
            return everyone

        return cls(rank=rank, world=world, nodes=tuple(nodes), device=device, gather=gather, mail=GroupMail(device))

    @property
    def leads_node(self) -> bool:
        """Whether it is the first rank of its node."""
        return self.nodes.index(self.nodes[self.rank]) == self.rank


def calibrate(
    module: nn.Module,
    batch: BatchShape,
    cluster: Cluster,
    ranks: RankLinks,
    *,
    budget_seconds: float,
    progress: Progress,
    choices: Choices = Choices(precision=PRECISIONS["32"]),  # noqa: B008
) -> Calibration:
    """Collective: measure for about so many seconds; all ranks return the same.

    The module, which may be on the meta device, and the state of random numbers stay as they are. Raises PlanError, on
    all ranks, where the model's shapes can't be read.
    """
    setting = Setting(device=ranks.device, batch=batch, cluster=cluster, choices=choices, now=ranks.now)
    sample = sample_of(module, setting.weight_dtype, ranks.device)
    experts = min(layer.experts for layer in sample.whole.moe)
    layouts = _loads(ranks.world, experts)
    cuda = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        progress("building two layers", 0.0)
        bench = Bench(sample, setting, layouts)
        together, alone = _compute(bench, ranks, budget_seconds, progress)
    progress("links", 0.8)
    near, far = _links(ranks, setting)
    handled = _handled(ranks)
    mine = Figures(node=ranks.nodes[ranks.rank], together=together, alone=alone, near=near, far=far, handled=handled)
    found = measured_cluster(cluster, ranks.gather(mine))
    progress("done", 1.0)
    return Calibration(model=sample.whole, cluster=found, batch=batch, choices=choices)


def _loads(world: int, experts: int) -> tuple[Layout, ...]:
    """A small and a large load of an F rank, as layouts of these ranks can give it."""
    half = max(1, world // 2)
    few = Layout(attention=1, ffn=max(1, min(world - 1, experts)))
    many = Layout(attention=half, ffn=min(half, experts))
    return (few,) if few == many else (few, many)


def _compute(bench: Bench, ranks: RankLinks, seconds: float, progress: Progress) -> tuple[Points, Points]:
    """Points while all ranks compute, and on the first rank of each node while it computes alone."""
    ranks.gather(None)
    progress("layers, all ranks at once", 0.1)
    together = bench.measure(0.5 * seconds)
    ranks.gather(None)
    progress("layers, one rank of each node", 0.6)
    crowded = len(set(ranks.nodes)) < ranks.world
    alone = bench.measure(0.2 * seconds) if crowded and ranks.leads_node else {}
    ranks.gather(None)
    return together, alone


def _links(ranks: RankLinks, setting: Setting) -> tuple[Sequence[Sample], Sequence[Sample]]:
    found: list[Sequence[Sample]] = []
    for peer in (near_peer(ranks.nodes, ranks.rank), far_peer(ranks.nodes, ranks.rank)):
        ranks.gather(None)
        found.append(() if peer is None else measure_pair(ranks.mail, ranks.rank, peer, ranks.device, setting.time))
    return found[0], found[1]


def _handled(ranks: RankLinks) -> Sequence[Handled]:
    """Only where the device is a CPU: others have hardware for it."""
    near = near_peer(ranks.nodes, ranks.rank)
    peer = far_peer(ranks.nodes, ranks.rank) if near is None else near
    ranks.gather(None)
    return () if peer is None or ranks.device.type != "cpu" else measure_handling(ranks.mail, peer)
