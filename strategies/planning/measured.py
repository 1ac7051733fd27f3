"""The rates of these ranks: a cluster as it is described, then as it is measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any, Protocol

import torch
import yaml
from torch import nn

from lightning_afd.allocate.request import Request
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import BatchShape, Choices

Progress = Callable[[str, float], None]
"""Told what is being measured, and which part (0..1) of all is behind."""


class Measured(Protocol):
    """What a model takes on these ranks."""

    def request(self, parts: int, **fields: Any) -> Request:
        """A request for a plan with these costs."""


class Calibrate(Protocol):
    """Collective: measures a model's segments, experts and links on all ranks; the same result on each."""

    def __call__(
        self,
        module: nn.Module,
        batch: BatchShape,
        cluster: Cluster,
        device: torch.device,
        *,
        budget_seconds: float,
        progress: Progress,
        choices: Choices,
    ) -> Measured: ...


def calibrated(
    module: nn.Module, batch: BatchShape, cluster: Cluster, device: torch.device, **options: Any
) -> Measured:
    """The real measurement, over the default process group."""
    from lightning_afd.calibrate import RankLinks, calibrate

    nodes = tuple(cluster.node_of(rank) for rank in range(cluster.devices))
    return calibrate(module, batch, cluster, RankLinks.over_default_group(nodes, device), **options)


def described(nodes: int, per_node: int, device: torch.device) -> Cluster:
    """Nodes, ranks and memory of this job; rates are those of conf/cluster/local.yaml until they are measured."""
    content = yaml.safe_load(files("lightning_afd").joinpath("conf", "cluster", "local.yaml").read_text())
    local = Cluster.read({**content, "num_nodes": nodes, "devices_per_node": per_node, "nics_per_node": per_node})
    rates = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), 0.1) | dict(local.device.peak_tflops)
    memory = _memory(device, per_node) / 1e9
    return replace(local, device=replace(local.device, memory_gb=memory, peak_tflops=rates, name=device.type))


def _memory(device: torch.device, per_node: int) -> float:
    """Bytes that a rank may use: those of its GPU, or its share of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node
