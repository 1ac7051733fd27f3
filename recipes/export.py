"""Write a checkpoint as a Hugging Face folder: `lightning-afd export ckpt=... out=...`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lightning_afd.errors import PlanError
from lightning_afd.recipes.launch import run_tool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lightning_afd.checkpoint.saved import Saved
    from lightning_afd.model.hub_export import TensorSource


PATHS = ("ckpt", "out", "config")


def main() -> None:
    """Compose and run what the command line asks for."""
    run_tool("export", run, PATHS)


def run(config: DictConfig) -> None:
    """Write the folder, one file after another, in this process."""
    from lightning_afd.checkpoint import open_checkpoint
    from lightning_afd.model.hub_export import FolderOptions, write_folder
    from lightning_afd.model.hub_model import HUB

    out = Path(config.out)
    saved = open_checkpoint(config.ckpt)
    source: TensorSource = SavedSource(saved)
    hub = saved.checkpoint.get(HUB, {"models": {}, "tokenizer": {}})
    model, part = chosen(source, hub["models"], config)
    options = FolderOptions(max_shard_size=config.max_shard_size, tokenizer=hub["tokenizer"])
    write_folder(model, part, out, options)
    sys.stdout.write(f"{out}: {type(model).__name__}, {model.num_parameters():,} parameters\n")


def chosen(source: TensorSource, models: Mapping[str, Any], config: DictConfig) -> tuple[Any, TensorSource]:
    """The model to write, without storage, and its tensors; raises PlanError where it is not clear which one."""
    from lightning_afd.model.hub_export import Below
    from lightning_afd.model.hub_model import described_by_folder, empty_model

    if config.config is not None:
        model = empty_model(described_by_folder(Path(config.config)))
        name = config.model if config.model is not None else attribute_of(model, source)
        return model, Below(source, name)
    if not models:
        raise PlanError(f"{config.ckpt} does not say what model it holds: add config=<folder with its config.json>")
    name = config.model if config.model is not None else next(iter(models))
    if name not in models or (config.model is None and len(models) > 1):
        raise PlanError(f"model={config.model} is not a choice; {config.ckpt} holds {', '.join(models)}")
    return empty_model(models[name]), Below(source, name)


def attribute_of(model: Any, source: TensorSource) -> str:
    """Name of the attribute below which the tensors of a model lie, found by those of its first one."""
    first = next(iter(model.state_dict()))
    found = [name.removesuffix(first) for name in source.names() if f".{name}".endswith(f".{first}")]
    if len(found) != 1:
        raise PlanError(f"{first} is {len(found)} times in the checkpoint: say which with model=<attribute>")
    return found[0].removesuffix(".")


class SavedSource:
    """The module's tensors in a checkpoint, one by one."""

    def __init__(self, saved: Saved) -> None:
        from lightning_afd.model.compiled import plain_name

        self._saved = saved
        self._stored = {plain_name(name): name for name in saved.names() if saved.shape(name) is not None}

    def names(self) -> list[str]:
        """Names of tensors, as they are where nothing is wrapped by torch.compile."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = self._saved.shape(self._stored[name])
        assert shape is not None
        return shape

    def dtype(self, name: str) -> torch.dtype:
        """As it was saved."""
        return self._saved.dtype(self._stored[name])

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        tensor: Tensor = self._saved.read({self._stored[name]: None})[self._stored[name]]
        return tensor
