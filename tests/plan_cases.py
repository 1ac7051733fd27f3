"""Small models and clusters whose plans are quick to make."""

from __future__ import annotations

from dataclasses import replace

from lightning_afd.cost.config import model_shape
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.model import ModelShape
from lightning_afd.recipes.shapes import model_fields, named_cluster


def model(name: str = "deepseek_moe_paper", layers: int | None = None) -> ModelShape:
    """A model of conf/; with fewer layers also with a smaller head, so that it has its share of the work."""
    fields = dict(model_fields(name))
    return model_shape(fields if layers is None else {**fields, "num_hidden_layers": layers, "vocab_size": 4096})


def cluster(nodes: int = 1, devices: int = 8, *, memory_gb: float = 1e6, nic: float = 50) -> Cluster:
    """H800s, by default with as much memory as anything needs."""
    found = named_cluster("h800_16x8")
    return replace(
        found,
        num_nodes=nodes,
        devices_per_node=devices,
        nics_per_node=devices,
        device=replace(found.device, memory_gb=memory_gb),
        nic=replace(found.nic, gb_per_s=nic),
    )
