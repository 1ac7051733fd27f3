"""Random numbers of micro-batches: the same on all A groups of a replica and in any order, others per replica.

And the state of all generators of a process, for checkpoints.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Seeds:
    """A stream of seeds, one per micro-batch; its state is part of a checkpoint."""

    def __init__(self, seed: int, replica: int) -> None:
        self._generator = torch.Generator().manual_seed(seed + replica)

    def next(self) -> int:
        return int(torch.randint(2**62, (), generator=self._generator))

    def state(self) -> Tensor:
        return self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        self._generator.set_state(state)


def separate_random_numbers(replica: int) -> None:
    """Dropout differs between data replicas; replica 0 goes on as a single process would."""
    if replica > 0:
        torch.manual_seed(torch.initial_seed() + replica)


def random_state() -> dict[str, Any]:
    """State of this process's generators (torch, CUDA, numpy, Python) as tensors and plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "cpu": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: dict[str, Any]) -> None:
    """Undo what has happened to the generators since `random_state`."""
    torch.set_rng_state(state["cpu"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
