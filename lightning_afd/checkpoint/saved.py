"""Checkpoints on disk: directories of this package, and Lightning's single files, behind one set of questions."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_afd.checkpoint.optimizer_state import ByName, by_number
from lightning_afd.checkpoint.tensors import TensorReader
from lightning_afd.errors import CheckpointError
from lightning_afd.expert_map import ExpertRows

META = "meta.pt"
FORMAT = 2
STATE, OPTIMIZERS = "state_dict", "optimizer_states"


class Saved(Protocol):
    """What can be asked of a checkpoint, whoever wrote it."""

    path: Path
    checkpoint: dict[str, Any]
    """Lightning's dict without `state_dict` and `optimizer_states`."""
    afd: dict[str, Any]
    """What strategy afd wrote beside it: layout, expert maps, random numbers and loaders per rank; {} in a file."""

    def names(self) -> list[str]:
        """Names in the module's state_dict, tied ones included."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor, [E, ...] for experts; None for an entry that is no tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype as stored."""

    def read(self, wanted: Mapping[str, ExpertRows | None]) -> dict[str, Any]:
        """Entries of the state_dict; of stacked experts only the rows that are asked for."""

    @property
    def optimizers(self) -> int | None:
        """Optimizers whose state was saved; None where only weights were."""

    def groups(self, optimizer: int) -> list[dict[str, Any]]:
        """Parameter groups of an optimizer, "params" by name or by torch's number."""

    def optimizer_state(self, optimizer: int, wanted: Mapping[Any, ExpertRows | None]) -> dict[Any, dict[str, Any]]:
        """State per parameter (by what `groups` calls it) of those that have any."""


class CheckpointReader:
    """A checkpoint directory of strategy afd.

    `names()`, `shape(name)`, `dtype(name)` and `read({name: None})` give the module's tensors one by one under their
    global names. Raises CheckpointError where the directory is incomplete, of another format, or holds objects other
    than tensors and plain values while `weights_only`.
    """

    def __init__(self, path: str | Path, *, weights_only: bool = True) -> None:
        self.path = Path(path)
        if not (self.path / META).is_file():
            raise CheckpointError(f"{self.path} is no complete checkpoint of strategy afd: {META} is missing")
        meta = load_file(self.path / META, weights_only, mmap=False)
        found = meta.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"{self.path} has format {found}, but this version of lightning-afd reads format {FORMAT}: "
                "load it with the version that wrote it"
            )
        self.checkpoint: dict[str, Any] = meta["checkpoint"]
        self.afd: dict[str, Any] = meta["afd"]
        self._optimizers: list[dict[str, Any]] | None = meta["optimizers"]
        self._objects: dict[str, Any] = meta["objects"]
        self._tied: dict[str, str] = meta["tied"]
        self._tensors = TensorReader(self.path)
        self._names = [path[1] for path in self._tensors.paths() if path[0] == STATE]

    def names(self) -> list[str]:
        """Global names of the module's tensors, tied ones under each name, and of its other state."""
        return [*self._names, *self._tied, *self._objects]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor, [E, ...] for experts; None for an entry that is no tensor."""
        return None if name in self._objects else self._tensors.shape(self._path(name))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype as stored."""
        return self._tensors.dtype(self._path(name))

    def read(self, wanted: Mapping[str, ExpertRows | None]) -> dict[str, Any]:
        """Tensors on the CPU by name; of stacked experts only the rows that are asked for, without reading others."""
        tensors = {name: rows for name, rows in wanted.items() if name not in self._objects}
        read = self._tensors.read({self._path(name): rows for name, rows in tensors.items()})
        return {name: self._objects[name] if name in self._objects else read[self._path(name)] for name in wanted}

    @property
    def optimizers(self) -> int | None:
        """Optimizers whose state was saved; None where only weights were."""
        return None if self._optimizers is None else len(self._optimizers)

    def groups(self, optimizer: int) -> list[dict[str, Any]]:
        """Parameter groups of an optimizer, "params" by name."""
        assert self._optimizers is not None
        groups: list[dict[str, Any]] = self._optimizers[optimizer]["groups"]
        return groups

    def optimizer_state(self, optimizer: int, wanted: Mapping[Any, ExpertRows | None]) -> ByName:
        """State of these parameters, by name; tensors without a row per expert are read whole."""
        prefix = (OPTIMIZERS, str(optimizer))
        paths = [path for path in self._tensors.paths() if path[:2] == prefix and path[2] in wanted]
        read = self._tensors.read({path: self._rows_of(path, wanted[path[2]]) for path in paths})
        assert self._optimizers is not None
        plain = self._optimizers[optimizer]["plain"]
        state: ByName = {name: dict(plain[name]) for name in wanted if name in plain}
        for (_, _, name, key), value in read.items():
            state.setdefault(name, {})[key] = value
        return state

    def _rows_of(self, path: tuple[str, ...], rows: ExpertRows | None) -> ExpertRows | None:
        return rows if rows is not None and self._tensors.shape(path)[:1] == (rows.total,) else None

    def _path(self, name: str) -> tuple[str, str]:
        return (STATE, self._tied.get(name, name))


class SingleFile:
    """A checkpoint file of Lightning's own strategies; tensors are mapped, so that only what is asked for is read."""

    def __init__(self, path: str | Path, *, weights_only: bool = True) -> None:
        self.path = Path(path)
        whole = load_file(self.path, weights_only, mmap=_is_zip(self.path))
        if not isinstance(whole, dict) or STATE not in whole:
            raise CheckpointError(f"{self.path} is no checkpoint of Lightning: it has no {STATE}")
        self._state: dict[str, Any] = whole[STATE]
        self._optimizers: list[dict[str, Any]] | None = whole.get(OPTIMIZERS)
        rest = {key: value for key, value in whole.items() if key not in (STATE, OPTIMIZERS)}
        self.checkpoint = copy.deepcopy(rest)  # what outlives this object must not stay mapped to the file
        self.afd: dict[str, Any] = {}

    def names(self) -> list[str]:
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...] | None:
        value = self._state[name]
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._state[name].dtype
        return dtype

    def read(self, wanted: Mapping[str, ExpertRows | None]) -> dict[str, Any]:
        return {name: _rows_of_value(self._state[name], rows) for name, rows in wanted.items()}

    @property
    def optimizers(self) -> int | None:
        return None if self._optimizers is None else len(self._optimizers)

    def groups(self, optimizer: int) -> list[dict[str, Any]]:
        assert self._optimizers is not None
        groups: list[dict[str, Any]] = self._optimizers[optimizer]["param_groups"]
        return groups

    def optimizer_state(self, optimizer: int, wanted: Mapping[Any, ExpertRows | None]) -> dict[Any, dict[str, Any]]:
        assert self._optimizers is not None
        state = self._optimizers[optimizer]["state"]
        return {
            number: {key: _rows_of_value(value, rows) for key, value in state[number].items()}
            for number, rows in wanted.items()
            if number in state
        }


def open_checkpoint(path: str | Path, *, weights_only: bool = True) -> Saved:
    """A directory of strategy afd, or a single file of Lightning's; raises CheckpointError for anything else."""
    if not Path(path).exists():
        raise CheckpointError(f"the checkpoint {path} does not exist")
    return (CheckpointReader if Path(path).is_dir() else SingleFile)(path, weights_only=weights_only)


def read_whole(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """All of a checkpoint directory as the dict that Lightning saves on one device, optimizer state included.

    `torch.save(read_whole("last.ckpt"), "whole.ckpt")` makes a file for `load_from_checkpoint` and for any strategy.
    """
    saved = CheckpointReader(path, weights_only=weights_only)
    whole = {**saved.checkpoint, STATE: saved.read(dict.fromkeys(saved.names()))}
    put_rank_state(whole, saved.afd["ranks"][0])
    if saved.optimizers is not None:
        whole[OPTIMIZERS] = [_whole_optimizer(saved, number) for number in range(saved.optimizers)]
    return whole


def _whole_optimizer(saved: CheckpointReader, number: int) -> dict[str, Any]:
    groups = saved.groups(number)
    names = [name for group in groups for name in group["params"]]
    return by_number(groups, saved.optimizer_state(number, dict.fromkeys(names)))


def take_rank_state(checkpoint: dict[str, Any], extra: Iterable[str]) -> dict[str, Any]:
    """Remove from Lightning's dict, without changing parts that others hold, what differs per rank; returns it.

    That are the positions of the dataloaders, and the entries named by `extra`.
    """
    taken = {key: checkpoint.pop(key) for key in extra if key in checkpoint}
    loops = checkpoint.get("loops", {})
    fit = loops.get("fit_loop", {})
    inner = dict(fit.get("state_dict", {}))
    loaders = inner.pop("combined_loader", None)
    if loaders is not None:
        checkpoint["loops"] = {**loops, "fit_loop": {**fit, "state_dict": inner}}
    return {"entries": taken, "loaders": loaders}


def put_rank_state(checkpoint: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Undo `take_rank_state`."""
    checkpoint.update(own["entries"])
    if own["loaders"] is not None:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loaders"]


def load_file(path: Path, weights_only: bool, *, mmap: bool) -> Any:
    """torch.load on the CPU; raises CheckpointError with what is wrong."""
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        if weights_only and "weights_only" in str(error).lower():
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, which only unpickling could load: if you trust "
                f"who wrote it, set AFDStrategy(weights_only=False) ({_asked_for(error)})"
            ) from None
        raise CheckpointError(f"{path} is no checkpoint that torch can read: {error}") from error
    except OSError:
        raise
    except Exception as error:  # what a file that is none does to an unpickler has no common class
        raise CheckpointError(f"{path} is no checkpoint that torch can read: {error}") from error


def _is_zip(path: Path) -> bool:
    """Whether torch can map the file: its format before version 1.6 cannot be."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def write_meta(meta: Mapping[str, Any], folder: Path) -> None:
    """Commit a directory: the file without which it is none, on disk before this returns."""
    with open(folder / META, "wb") as file:
        torch.save({"format": FORMAT, **meta}, file)
        file.flush()
        os.fsync(file.fileno())


def _asked_for(error: Exception) -> str:
    """The line of torch's long text that names the object."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])


def _rows_of_value(value: Any, rows: ExpertRows | None) -> Any:
    """A copy of the rows of some experts, where `value` has a row per expert."""
    if rows is None or not isinstance(value, Tensor) or value.shape[:1] != (rows.total,):
        return value.clone() if isinstance(value, Tensor) else value
    return value[list(rows.experts)]
