"""Checkpoints of a job in which each rank owns a part: one directory that any layout loads (lightning_afd.checkpoint).

It is written under a hidden name and gets its own by a rename, so that nobody ever sees a part of it.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_afd.checkpoint import held, open_checkpoint, optimizer_state
from lightning_afd.checkpoint.saved import OPTIMIZERS, STATE, Saved, put_rank_state, take_rank_state, write_meta
from lightning_afd.checkpoint.tensors import Part, write_tensors
from lightning_afd.model.experts_module import rows_of
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import Layout
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.divided import loading, share_of
from lightning_afd.strategies.global_batch import GlobalBatch, describe_change
from lightning_afd.strategies.seeds import random_state, set_random_state


class RankCheckpoints:
    """Save what this rank owns under global names, and load what it owns from any checkpoint of the same module."""

    def __init__(self, strategy: RankedStrategy) -> None:
        self._strategy = strategy
        self._names: list[optimizer_state.GroupNames] = []
        """Of each optimizer."""
        self._saved: Saved | None = None
        self._batch: GlobalBatch | None = None
        self._saved_batch: dict[str, int] | None = None
        self.notes: dict[str, Any] = {}
        """Plain values that travel with the checkpoint, such as a tuned chunk size or a plan."""

    def name_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        """To be called while the optimizers still hold the parameters of all ranks."""
        module = self._strategy.lightning_module
        self._names = [optimizer_state.group_names(optimizer, module) for optimizer in optimizers]

    def note_batches(self, loader: Any) -> None:
        """To be called with the dataloader of a fit, behind a restore: warn if an optimizer step has other rows now."""
        accumulated = self._strategy.lightning_module.trainer.accumulate_grad_batches
        self._batch = GlobalBatch.of(loader, self._strategy.layout.attention, accumulated)
        changed, self._saved_batch = describe_change(self._saved_batch, self._batch), None
        if changed is not None:
            rank_zero_warn(changed)

    # -- save -----------------------------------------------------------------------------------------------------

    def owned_state(self) -> dict[str, Any]:
        """What this rank brings of the module's state."""
        return held.offered_state(self._strategy.lightning_module, first_replica=self._replica == 0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What this rank brings of an optimizer's state."""
        number = next(n for n, known in enumerate(self._strategy.optimizers) if known is optimizer)
        names, optimizer = self._names[number], share_of(optimizer)
        parameters = optimizer_state.held_parameters(optimizer, self._strategy.lightning_module, names)
        tensors, plain = optimizer_state.dump_state(optimizer, parameters)
        return {"groups": optimizer_state.dump_groups(optimizer, names), "tensors": tensors, "plain": plain}

    def save(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Collective: all ranks write what they own, rank 0 the rest; then it gives the directory its name."""
        strategy = self._strategy
        path = _local_path(strategy.broadcast(str(filepath)))
        temporary = _hidden(path, "saving")
        if strategy.is_global_zero:
            _delete(temporary)
            temporary.mkdir(parents=True)
        strategy.barrier()
        checkpoint = dict(checkpoint)
        state, optimizers = checkpoint.pop(STATE), checkpoint.pop(OPTIMIZERS, None)
        own = take_rank_state(checkpoint, self._entries_per_rank())
        own |= {"random": random_state(), "seeds": strategy.seeds.state()}
        tied = held.tied_names(state)
        write_tensors(self._tree(state, tied, optimizers or []), temporary)
        brought = {
            "own": own,
            "tied": tied,
            "objects": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
            "plain": [optimizer["plain"] for optimizer in optimizers or []],
        }
        everyone = strategy.transport.gather_object(brought)
        if everyone is not None:
            write_meta(self._meta(checkpoint, optimizers, everyone), temporary)
            _rename(temporary, path)
        strategy.barrier()

    def _tree(self, state: dict[str, Any], tied: dict[str, str], optimizers: Sequence[dict[str, Any]]) -> Any:
        """The tensors that this rank brings."""
        rows = held.rows_by_name(self._strategy.lightning_module)
        tensors = {
            name: Part(value, rows[name]) if name in rows else value
            for name, value in state.items()
            if isinstance(value, Tensor) and name not in tied
        }
        states = {str(number): optimizer["tensors"] for number, optimizer in enumerate(optimizers)}
        tree = {STATE: tensors, OPTIMIZERS: {number: named for number, named in states.items() if named}}
        return {name: branch for name, branch in tree.items() if branch}

    def _meta(self, checkpoint: dict[str, Any], optimizers: Any, everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 writes: Lightning's dict, and all small things of all ranks."""
        merged = {
            key: {k: v for part in reversed(everyone) for k, v in part[key].items()} for key in ("tied", "objects")
        }
        if optimizers is not None:
            optimizers = [
                {
                    "groups": optimizer["groups"],
                    "plain": {name: value for part in everyone for name, value in part["plain"][number].items()},
                }
                for number, optimizer in enumerate(optimizers)
            ]
        afd = {
            "layout": asdict(self._strategy.layout),
            "expert_maps": self._strategy.expert_maps(),
            "ranks": [part["own"] for part in everyone],
            "batch": None if self._batch is None else asdict(self._batch),
            "notes": self.notes,
        }
        return {"checkpoint": checkpoint, "optimizers": optimizers, "afd": afd, **merged}

    # -- load -----------------------------------------------------------------------------------------------------

    def load(self, filepath: Any, weights_only: bool) -> dict[str, Any]:
        """Lightning's dict with this rank's part of the module's state."""
        path = _local_path(self._strategy.broadcast(str(filepath)))
        saved = self._saved = open_checkpoint(path, weights_only=weights_only)
        checkpoint = dict(saved.checkpoint)
        module = self._strategy.lightning_module
        known, needed, rows = set(module.state_dict()), held.needed_names(module), held.rows_by_name(module)
        wanted = {
            # unknown names may get a known one in the user's on_load_checkpoint
            name: rows[name] if name in rows and (saved.shape(name) or ())[:1] == (rows[name].total,) else None
            for name in saved.names()
            if name in needed or name not in known
        }
        checkpoint[STATE] = saved.read(wanted)
        if saved.optimizers is not None:
            checkpoint[OPTIMIZERS] = [saved.groups(number) for number in range(saved.optimizers)]
        self.notes = dict(saved.afd.get("notes", {}))
        self._saved_batch = saved.afd.get("batch") if self._is_fitting else None
        self._take_rank_state(checkpoint, saved)
        return checkpoint

    def restore_owned(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load the module's state; raises CheckpointError naming what is missing, unknown or of another shape."""
        held.restore_state(self._strategy.lightning_module, state, strict=strict)
        if not self._is_fitting:
            self._saved = None

    def restore_optimizers(self, checkpoint: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Read and load the state of this rank's parameters."""
        saved, self._saved = self._saved, None
        assert saved is not None
        for number, (optimizer, groups) in enumerate(zip(optimizers, checkpoint[OPTIMIZERS], strict=True)):
            names = self._names[number]
            keys = optimizer_state.keys_of(groups, names)
            with loading(optimizer) as share:
                parameters = optimizer_state.held_parameters(share, self._strategy.lightning_module, names)
                rows = {keys[name]: rows_of(parameter) for name, parameter in parameters.items()}
                read = saved.optimizer_state(number, rows)
                state = {name: read[keys[name]] for name in parameters if keys[name] in read}
                optimizer_state.restore(share, parameters, groups, state)

    def _take_rank_state(self, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Dataloader position, random numbers and the datamodule's state: those of the same replica."""
        strategy = self._strategy
        is_attention = strategy.layout.worker_of(strategy.global_rank).role == "A"
        if not saved.afd:  # one state for all replicas, as Lightning's own strategies save it
            own = take_rank_state(checkpoint, ())
            put_rank_state(checkpoint, own if is_attention else {**own, "loaders": None})
            return
        before, ranks = Layout(**saved.afd["layout"]), saved.afd["ranks"]
        same = replace(before, node_ranks=1) == replace(strategy.layout, node_ranks=1)  # who owns what
        own = ranks[strategy.global_rank if same else before.first_rank(self._replica % before.attention)]
        put_rank_state(checkpoint, own if is_attention or same else {**own, "loaders": None})
        if self._is_fitting and (same or (is_attention and self._replica < before.attention)):
            set_random_state(own["random"])
            strategy.seeds.restore(own["seeds"])
        if self._is_fitting and before.attention != strategy.layout.attention:
            rank_zero_info(
                f"{saved.path} was saved by {before.attention} data replicas, this job has "
                f"{strategy.layout.attention}: each goes on at the number of batches that one replica had seen, so the "
                "samples seen are the same if the global batches are; new replicas have random numbers of their own"
            )

    # -- remove ---------------------------------------------------------------------------------------------------

    def remove(self, filepath: Any) -> None:
        """Rank 0 deletes a checkpoint."""
        if self._strategy.is_global_zero:
            path = _local_path(filepath)
            if path.is_symlink() or not path.is_dir():
                _delete(path)
            else:
                trash = _hidden(path, "removing")  # a directory that is half deleted must not look like a checkpoint
                _delete(trash)
                os.replace(path, trash)
                _delete(trash)

    # -- small questions ------------------------------------------------------------------------------------------

    @property
    def _replica(self) -> int:
        """Data replica of an A rank; F ranks look like the first one."""
        layout, rank = self._strategy.layout, self._strategy.global_rank
        return layout.index_of(rank) if layout.worker_of(rank).role == "A" else 0

    @property
    def _is_fitting(self) -> bool:
        return self._strategy.lightning_module.trainer.state.fn == "fit"

    def _entries_per_rank(self) -> list[str]:
        """The datamodule's entry in Lightning's dict: it may hold a position in the data."""
        datamodule = self._strategy.lightning_module.trainer.datamodule
        return [] if datamodule is None else [type(datamodule).__qualname__]


def _local_path(path: Any) -> Path:
    if "://" in str(path):
        raise MisconfigurationException(
            f"checkpoints belong on a file system that all ranks share, but got {path}: set a folder"
        )
    return Path(path)


def _hidden(path: Path, use: str) -> Path:
    """A name beside `path` in which nobody who looks for checkpoints finds anything."""
    return path.with_name(f".afd-{zlib.crc32(path.name.encode()):08x}-{use}")


def _rename(temporary: Path, path: Path) -> None:
    """Give a complete directory its name; what had the name before is deleted only then."""
    old = _hidden(path, "old")
    _delete(old)
    if path.is_symlink() or path.exists():
        os.replace(path, old)
    os.replace(temporary, path)
    _delete(old)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
