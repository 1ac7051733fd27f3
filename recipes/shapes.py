"""Models and clusters of conf/ as values of the cost model."""

from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_afd.cost.config import model_shape
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.model import ModelShape


def named_cluster(name: str) -> Cluster:
    """The cluster of conf/cluster/<name>.yaml."""
    return Cluster.read(_group("cluster", name))


def named_model(name: str) -> ModelShape:
    """The shapes of conf/model/<name>.yaml."""
    from transformers import AutoConfig

    return model_shape(AutoConfig.for_model(**model_fields(name)).to_dict())


def model_fields(name: str) -> dict[str, Any]:
    """What conf/model/<name>.yaml gives transformers' AutoConfig.for_model."""
    fields: dict[str, Any] = _group("model", name)["config"]
    return fields


def _group(group: str, name: str) -> dict[str, Any]:
    with initialize_config_module(version_base="1.3", config_module="lightning_afd.conf"):
        config = compose("config", [f"{group}={name}", "output_dir=."])
    found: dict[str, Any] = OmegaConf.to_container(config[group], resolve=True)  # type: ignore[assignment]
    return found
