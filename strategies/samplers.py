"""Rows of evaluation, divided over the A ranks by whole batches: no row twice, and each batch as on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, Sampler


class OwnBatches(Sampler[int]):
    """The rows of batches a, a + n, a + 2n ... of the `whole` order, where n ranks share batches of `size` rows."""

    def __init__(self, whole: DistributedSampler[Any], size: int, replicas: int, replica: int) -> None:
        self._whole = whole
        self._size = size
        self._replicas = replicas
        self._replica = replica

    def __iter__(self) -> Iterator[int]:
        for number, row in enumerate(self._whole):
            if number // self._size % self._replicas == self._replica:
                yield row

    def __len__(self) -> int:
        batches, rest = divmod(len(self._whole), self._size)
        mine = len(range(self._replica, batches, self._replicas)) * self._size
        return mine + (rest if batches % self._replicas == self._replica else 0)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as the sampler would."""
        self._whole.set_epoch(epoch)


def use_own_batches(loader: Any, replicas: int, replica: int) -> None:
    """Where a DistributedSampler divides the rows of a loader (Lightning's own one does), divide batches instead.

    Loaders with other samplers, batch samplers of the user's own, or no batch size stay as they are.
    """
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "_batch_sampler", batches)  # Lightning's wrapper, which notes the rows of predictions
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not isinstance(sampler, DistributedSampler):
        return
    if (sampler.num_replicas, sampler.rank) == (replicas, replica):
        batches.sampler = OwnBatches(_undivided(sampler), batches.batch_size, replicas, replica)


def _undivided(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """The same order of rows for one rank."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(whole.dataset)  # type: ignore[arg-type]
    return whole
