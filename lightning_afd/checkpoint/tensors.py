"""Tensors of a checkpoint directory: global names in the format of torch.distributed.checkpoint (DCP).

A parameter that one rank holds whole is one key. The experts of a layer are one key per parameter, a tensor [E, ...] of
which each rank writes and reads its own rows at their global expert numbers: no name or offset depends on the layout.
Any number of ranks may offer the same rows; DCP lets one of them write, so that replicas share the work.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_afd.errors import CheckpointError
from lightning_afd.expert_map import ExpertRows

METADATA = ".metadata"
TensorPath = tuple[str, ...]
"""Path of a tensor in the nested dict that was written, such as ("state_dict", "model.norm.weight")."""
PIECE_BYTES = 64 * 2**20
"""Own rows are written in pieces of about this size, as a piece is what a reader has to read whole."""


@dataclass(frozen=True)
class Part:
    """The rows of a tensor [E, ...] that this rank holds; the names with underscores are DCP's protocol."""

    tensor: Tensor
    rows: ExpertRows

    def __post_init__(self) -> None:
        if len(self.tensor) != len(self.rows.experts):
            raise ValueError(f"{len(self.tensor)} rows for {len(self.rows.experts)} experts")

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size((self.rows.total, *self.tensor.shape[1:]))

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(first global expert, first own row, length) of all pieces, which depend on experts and sizes only."""
        row_bytes = max(1, self.tensor[:1].numel() * self.tensor.element_size())
        step = max(1, PIECE_BYTES // row_bytes)
        for first, start, length in self.rows.runs():
            for offset in range(0, length, step):
                yield first + offset, start + offset, min(step, length - offset)

    def piece_at(self, index: MetadataIndex) -> Tensor:
        """The piece that begins at an offset."""
        assert index.offset is not None
        _, start, length = next(piece for piece in self.pieces() if piece[0] == index.offset[0])
        return self.tensor[start : start + length]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        inner = self.tensor.shape[1:]
        zeros = [0] * len(inner)
        return [
            ChunkStorageMetadata(torch.Size((first, *zeros)), torch.Size((length, *inner)))
            for first, _, length in self.pieces()
        ]


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, with `Part`s."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.piece_at(index) if isinstance(value, Part) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, with `Part`s, for a flat dict that is filled in place."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.flatten_state_dict = False
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.piece_at(index) if isinstance(value, Part) else super().lookup_tensor(index)


def write_tensors(tree: Mapping[str, Any], folder: Path) -> None:
    """Collective: every rank offers a nested dict whose leaves are tensors and `Part`s; the folder must exist.

    Raises CheckpointError on all ranks where one of them fails, or where nobody holds some expert.
    """
    try:
        dcp.save(dict(tree), storage_writer=dcp.FileSystemWriter(str(folder)), planner=SavePlanner())
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder} cannot be written, rank {rank}: {type(cause).__name__}: {cause}") from error


class TensorReader:
    """The tensors of a checkpoint directory, read whole or some experts of them.

    Nothing is unpickled but DCP's own description of shapes and places.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _SafeReader(str(folder))
        try:
            self._metadata = self._reader.read_metadata()
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no tensors: {METADATA} is missing") from None
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._keys = {tuple(path): key for key, path in self._metadata.planner_data.items()}

    def paths(self) -> list[TensorPath]:
        """Where the tensors are."""
        return list(self._keys)

    def shape(self, path: TensorPath) -> tuple[int, ...]:
        """Shape of the whole tensor, [E, ...] for experts."""
        return tuple(self._stored(path).size)

    def dtype(self, path: TensorPath) -> torch.dtype:
        """Dtype as stored."""
        return self._stored(path).properties.dtype

    def read(self, wanted: Mapping[TensorPath, ExpertRows | None]) -> dict[TensorPath, Tensor]:
        """Tensors on the CPU: whole ones, and of stacked ones only the rows that are asked for, in their order."""
        found = {path: self._empty(path, rows) for path, rows in wanted.items()}
        into = {
            self._keys[path]: found[path] if rows is None else Part(found[path], rows) for path, rows in wanted.items()
        }
        planner = _LoadPlanner()
        planner.set_up_planner(into, self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return found

    def _empty(self, path: TensorPath, rows: ExpertRows | None) -> Tensor:
        stored = self._stored(path)
        shape = stored.size if rows is None else (len(rows.experts), *stored.size[1:])
        return torch.empty(shape, dtype=stored.properties.dtype)

    def _stored(self, path: TensorPath) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata[self._keys[path]]
        assert isinstance(stored, TensorStorageMetadata)
        return stored


class _SafeReader(dcp.FileSystemReader):
    """DCP's reader, which unpickles nothing but its own metadata classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        assert isinstance(metadata, Metadata)
        return metadata


_NAMES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
)
_SAFE = {(Metadata.__module__, name) for name in _NAMES} | {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _SAFE:
            return super().find_class(module, name)
        raise CheckpointError(f"{METADATA} asks for {module}.{name}, which no checkpoint needs: do not trust it")
