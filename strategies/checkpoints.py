"""Checkpoints of a job in which each rank owns a part: a directory with a file per rank, committed by its meta file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from lightning_afd.model.place import foreign_names
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies.base import RankedStrategy

META = "meta.pt"
FORMAT = 1


class RankCheckpoints:
    """Save and load what this rank owns."""

    def __init__(self, strategy: RankedStrategy) -> None:
        self._strategy = strategy

    def owned_state(self) -> dict[str, Any]:
        """The module's state without parameters of other ranks."""
        module = self._strategy.lightning_module
        foreign = foreign_names(module)
        return {
            name: value for name, value in module.state_dict().items() if name not in foreign and not _is_lazy(value)
        }

    def restore_owned(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load `owned_state`; raises RuntimeError for owned names that are missing, and for unknown ones, if strict."""
        module = self._strategy.lightning_module
        mine = set(self.owned_state())
        missing, unexpected = sorted(mine - set(state)), sorted(set(state) - mine)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the checkpoint misses {missing or 'nothing'} and has unknown {unexpected or 'nothing'}"
            )
        module.load_state_dict({name: value for name, value in state.items() if name in mine}, strict=False)

    def save(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Collective: every rank writes its file into a temporary directory, which rank 0 then renames."""
        strategy = self._strategy
        path = Path(strategy.broadcast(str(filepath)))
        temporary = path.with_name(path.name + ".tmp")
        if strategy.is_global_zero:
            _remove(temporary)
            temporary.mkdir(parents=True)
        strategy.barrier()
        checkpoint = {**checkpoint, "afd": {"random": _random_state(), "seeds": strategy.seeds.state()}}
        if self._is_copy():
            checkpoint.pop("state_dict", None)
            checkpoint.pop("optimizer_states", None)
        torch.save(checkpoint, temporary / _file(strategy.global_rank))
        strategy.barrier()
        if strategy.is_global_zero:
            meta = {"format": FORMAT, "layout": vars(strategy.layout), "world": strategy.world_size}
            torch.save(meta, temporary / META)
            _remove(path)
            os.replace(temporary, path)
        strategy.barrier()

    def load(self, filepath: Any, weights_only: bool | None) -> dict[str, Any]:
        """This rank's part; raises MisconfigurationException where the directory was made by another layout."""
        strategy = self._strategy
        path = Path(strategy.broadcast(str(filepath)))
        if not (path / META).is_file():
            raise MisconfigurationException(f"{path} is no complete checkpoint of strategy afd: {META} is missing")
        meta = torch.load(path / META, weights_only=True)
        if meta["layout"] != vars(strategy.layout):
            raise MisconfigurationException(
                f"{path} was saved with {meta['layout']}, this job has {vars(strategy.layout)}: "
                "resume with the layout that saved it"
            )
        safe = True if weights_only is None else weights_only
        checkpoint = torch.load(path / _file(strategy.global_rank), map_location="cpu", weights_only=safe)
        if self._is_copy():
            first = torch.load(path / _file(self._first_of_group()), map_location="cpu", weights_only=safe)
            checkpoint["state_dict"] = first["state_dict"]
            checkpoint["optimizer_states"] = first.get("optimizer_states", [])
        _set_random_state(checkpoint["afd"]["random"])
        strategy.seeds.restore(checkpoint["afd"]["seeds"])
        return dict(checkpoint)

    def remove(self, filepath: Any) -> None:
        if self._strategy.is_global_zero:
            _remove(Path(filepath))

    def _is_copy(self) -> bool:
        """Whether another rank holds the same parameters: all A ranks but the first of a group."""
        layout, rank = self._strategy.layout, self._strategy.global_rank
        return layout.worker_of(rank).role == "A" and layout.index_of(rank) > 0

    def _first_of_group(self) -> int:
        layout = self._strategy.layout
        return layout.ranks_of(layout.worker_of(self._strategy.global_rank))[0]


def _file(rank: int) -> str:
    return f"rank-{rank}.ckpt"


def _is_lazy(value: Any) -> bool:
    """Whether a buffer of a module that does not run here was never materialised."""
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
