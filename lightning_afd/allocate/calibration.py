"""A model on a cluster whose rates were measured with it: what a request to the planner is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_afd.allocate.request import Request
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import BatchShape, Choices
from lightning_afd.cost.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The same on all ranks."""

    model: ModelShape
    cluster: Cluster
    """With measured scales, links and shared cores; `as_dict` and `Cluster.read` bring it to a file and back."""
    batch: BatchShape
    """One micro-batch of one data replica."""
    choices: Choices
    """What it was measured with."""

    def request(self, parts: int, **fields: Any) -> Request:
        """A plan for so many micro-batches of all replicas per optimizer step; `fields` are others of Request."""
        return Request(
            model=self.model, cluster=self.cluster, batch=self.batch, parts=parts, choices=self.choices, **fields
        )
