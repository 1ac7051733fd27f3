"""The safetensors files of a Hugging Face folder: names and shapes at once, tensors, or rows of them, on request."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_afd.errors import PlanError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HubFolder:
    """Open files of a folder, a context manager; raises PlanError for a folder without readable weights."""

    def __init__(self, path: Path) -> None:
        self._stack, self._file_of = ExitStack(), dict[str, Any]()
        for name in weight_files(path):
            try:
                file = self._stack.enter_context(safe_open(path / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise PlanError(f"{path / name} can't be read: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> HubFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor, which may be a view of the file: copy it."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a tensor, in their order; the others are not read."""
        window = self._file_of[name].get_slice(name)
        return torch.cat([window[start:stop] for start, stop in _runs(rows)])


def weight_files(path: Path) -> list[str]:
    """Names of the folder's safetensors files; raises PlanError where there are none."""
    if (path / INDEX).is_file():
        return sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    if (path / SINGLE).is_file():
        return [SINGLE]
    raise PlanError(f"{path} is no Hugging Face folder with weights: it has neither {INDEX} nor {SINGLE}")


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive rows as (first, behind the last)."""
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[index - 1] + 1:
            yield rows[start], rows[index - 1] + 1
            start = index
