"""Write a checkpoint as a Hugging Face folder: `lightning-afd export ckpt=... out=...`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from lightning_afd.errors import AFDError, PlanError
from lightning_afd.recipes.launch import check_given, compose, fail

if TYPE_CHECKING:
    from lightning_afd.model.hub_export import TensorSource


PATHS = ("ckpt", "out", "config")


def main() -> None:
    """Compose and run what the command line asks for."""
    sys.argv[1:] = [quoted(argument) for argument in sys.argv[1:]]
    compose(_job, "export")


def quoted(argument: str) -> str:
    """Quote a path for Hydra: names of checkpoints hold an = ("step=300-val_loss=2.100.ckpt")."""
    key, equals, value = argument.partition("=")
    if key not in PATHS or not equals or value[:1] in ("", "'", '"'):
        return argument
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def _job(config: DictConfig) -> None:
    try:
        check_given(config)
        run(config)
    except AFDError as error:
        fail(str(error), 1)


def run(config: DictConfig) -> None:
    """Write the folder, one file after another, in this process."""
    from lightning_afd.model.hub_export import FolderOptions, write_folder
    from lightning_afd.model.hub_model import HUB

    ckpt, out = Path(config.ckpt), Path(config.out)
    source, checkpoint = open_checkpoint(ckpt)
    hub = checkpoint.get(HUB, {"models": {}, "tokenizer": {}})
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


def open_checkpoint(path: Path) -> tuple[TensorSource, Mapping[str, Any]]:
    """The tensors of the module in a checkpoint, and the rest of it."""
    import torch

    if path.is_file():
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return _source(checkpoint["state_dict"]), checkpoint
    if not (path / "meta.pt").is_file():
        raise PlanError(f"{path} is no complete checkpoint: meta.pt is missing")
    layout = torch.load(path / "meta.pt", weights_only=True)["layout"]
    files = [path / f"rank-{rank}.ckpt" for rank in range(layout["groups"] * (layout["attention"] + layout["ffn"]))]
    parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]
    states = [part.get("state_dict", {}) for part in parts]
    dense, experts = states[: layout["groups"] * layout["attention"]], states[layout["groups"] * layout["attention"] :]
    state = {name: tensor for part in reversed(dense) for name, tensor in part.items()}
    for name in {name for part in experts for name in part} - state.keys():
        state[name] = torch.cat([part[name] for part in experts if name in part])
    return _source(state), parts[0]


def _source(state: Mapping[str, Any]) -> TensorSource:
    """Tensors under the names that they have where nothing is wrapped by torch.compile."""
    from lightning_afd.model.compiled import plain_name
    from lightning_afd.model.hub_export import StateSource

    return StateSource({plain_name(name): tensor for name, tensor in state.items()})
