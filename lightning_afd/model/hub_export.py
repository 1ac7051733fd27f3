"""Write weights as a Hugging Face folder that `from_pretrained` loads, one file after another.

At most one file's tensors and one layer's are in memory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lightning_afd.errors import PlanError
from lightning_afd.model.hub_folder import INDEX
from lightning_afd.model.hub_names import Tensors, Unit, listed, tied_names, to_hub, units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TensorSource(Protocol):
    """Whole tensors of a checkpoint by name, read one at a time."""

    def names(self) -> Collection[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, all experts included."""

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""


class StateSource:
    """The tensors of a plain state dict."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def names(self) -> Collection[str]:
        return self._state.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype

    def read(self, name: str) -> Tensor:
        return self._state[name]


class Below:
    """The tensors of another source whose names start with a prefix, without it: of one model inside a module."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source, self._prefix = source, f"{prefix}." if prefix else ""

    def names(self) -> Collection[str]:
        start = self._prefix
        return [name.removeprefix(start) for name in self._source.names() if name.startswith(start)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._prefix + name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._prefix + name)

    def read(self, name: str) -> Tensor:
        return self._source.read(self._prefix + name)


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """How a folder is written."""

    max_shard_size: int | str = "5GB"
    """Largest file, in bytes or as "5GB"; a tensor that is larger has a file of its own."""
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    """Texts of a tokenizer's files by name."""


def write_folder(model: PreTrainedModel, source: TensorSource, out: Path, options: FolderOptions) -> None:
    """Write configuration, tokenizer and the weights of `source` for `model`, which may be on the meta device.

    `source` has the names of the model's own state dict. The folder appears under its name when it is complete.
    Raises PlanError for tensors that are missing, unexpected or of another shape, and where `out` exists.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PlanError(f"{out} exists and is not empty: choose another folder, or remove it")
    origin = _origins(model, source)
    state = {name: _outline(source, held) for name, held in origin.items()}
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_settings(model, _main_dtype(state), temporary, options.tokenizer)
    parts = _Parts(model, lambda name: source.read(origin[name]), units(model, state))
    _write_weights(parts, to_hub(model, state), temporary, options.max_shard_size)
    if out.exists():
        out.rmdir()
    os.replace(temporary, out)


def _origins(model: PreTrainedModel, source: TensorSource) -> dict[str, str]:
    """Name in the source of each tensor of the folder: that of any tied name; all of them are checked."""
    state, held = model.state_dict(), set(source.names())
    tied = tied_names(model)
    missing = [name for name, names in tied.items() if held.isdisjoint(names)]
    unexpected = sorted(held - state.keys())
    if missing or unexpected:
        what = listed(missing, unexpected)
        raise PlanError(f"the checkpoint does not hold the weights of a {type(model).__name__}: {what}")
    origin = {name: next(other for other in (name, *names) if other in held) for name, names in tied.items()}
    for name, other in origin.items():
        if source.shape(other) != tuple(state[name].shape):
            raise PlanError(
                f"{other} has the shape {list(source.shape(other))} in the checkpoint, and {list(state[name].shape)} "
                "by the model's configuration"
            )
    return origin


def _outline(source: TensorSource, name: str) -> Tensor:
    return torch.empty(source.shape(name), dtype=source.dtype(name), device="meta")


def _main_dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of most of a model's numbers: `from_pretrained` loads it all in the dtype that the config names."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in state.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _write_settings(model: PreTrainedModel, dtype: torch.dtype, folder: Path, tokenizer: Mapping[str, str]) -> None:
    """What `save_pretrained` of transformers writes beside weights, and the tokenizer."""
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    for name, text in tokenizer.items():
        (folder / Path(name).name).write_text(text, encoding="utf-8")


def _write_weights(parts: _Parts, outline: Tensors, folder: Path, max_shard_size: int | str) -> None:
    """Divide the outline, in its order, into files as transformers does, and write one after another."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(
        outline, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        save_file(parts.collect(set(names)), folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        metadata = {"total_parameters": parts.model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Parts:
    """Weights under their names on the hub, converted a layer at a time."""

    model: PreTrainedModel
    read: Callable[[str], Tensor]
    units: list[Unit]

    def collect(self, wanted: set[str]) -> Tensors:
        """The tensors of one file; a layer that lies in two files is read for each of them."""
        tensors: Tensors = {}
        for unit in self.units:
            if not wanted.isdisjoint(unit.hub):
                converted = to_hub(self.model, {name: self.read(name) for name in unit.names})
                tensors |= {name: tensor for name, tensor in converted.items() if name in wanted}
        return tensors
