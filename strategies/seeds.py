"""Random numbers of micro-batches: the same on all A groups of a replica and in any order, others per replica."""

from __future__ import annotations

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
