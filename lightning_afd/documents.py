"""Packed documents for a dataloader: rows of whole length, dealt to data replicas with equal work in attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from lightning_afd.errors import PlanError
from lightning_afd.packing import attention_work, deal, deal_plainly, imbalance, rows_of_documents

Documents = list[Tensor]
"""The documents of one row: ids [length] each."""


class PackedRows(Dataset[Documents]):
    """Rows of exactly S = `seq_len` tokens; item i is the list of its documents, which don't see one another.

    `ids` [tokens] holds all documents, one behind the other, `lengths` their tokens. A document that crosses the end of
    a row goes on in the next one as one of its own.
    """

    def __init__(self, ids: Tensor, lengths: Sequence[int], seq_len: int) -> None:
        if sum(lengths) != len(ids):
            raise PlanError(f"the documents have {sum(lengths)} tokens, their lengths promise {len(ids)}")
        self.lengths = rows_of_documents(lengths, seq_len)
        self.ids_RS = ids[: len(self.lengths) * seq_len].view(-1, seq_len)

    @property
    def work(self) -> list[int]:
        """Of attention, by row."""
        return [attention_work(row) for row in self.lengths]

    def tokens(self) -> Tensor:
        """All of them."""
        return self.ids_RS.flatten()

    def targets(self) -> Tensor:
        """Those that a model predicts: all but the first one of each document."""
        lengths = torch.tensor([length for row in self.lengths for length in row])
        is_first = torch.zeros(self.ids_RS.numel(), dtype=torch.bool)
        is_first[lengths.cumsum(0) - lengths] = True
        return self.tokens()[~is_first]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Documents:
        return list(self.ids_RS[index].split(list(self.lengths[index])))


class FlattenRows:
    """Collate rows of documents into one row, as transformers' DataCollatorWithFlattening does for documents.

    Labels leave out the first token of each document: nothing is predicted from another one. The borders for flash
    attention are made here, on the CPU, since a layer that reads them off the positions waits for the GPU.
    """

    def __init__(self) -> None:
        from transformers import DataCollatorWithFlattening

        self._flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def __call__(self, rows: Sequence[Documents]) -> dict[str, Any]:
        """Return input_ids, labels, position_ids [1, T], cu_seq_lens_q/k int32 [D + 1], max_length_q/k."""
        documents = [{"input_ids": document} for row in rows for document in row]
        batch: dict[str, Any] = self._flatten(documents, return_tensors="pt")
        return batch


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Who shares a global batch; the fields are those of `trainer.distributed_sampler_kwargs`."""

    num_replicas: int = 1
    """Data replicas: attention ranks of a group."""
    rank: int = 0
    """Which of them this is."""


class BalancedSampler(DistributedSampler[Any]):
    """Rows of one data replica, such that the replicas have nearly equal sums of `work` in each of their batches.

    Global batch j of an epoch consists of the same rows for any number of replicas, if their number times `batch_size`
    is the same. Order and division depend on seed and epoch alone: nothing is sent, and a resumed epoch is the same
    one. A last incomplete global batch is left out. Use it with DataLoader(batch_size=batch_size, sampler=...).
    Where `micro_batches` divides `batch_size`, the rows of a batch are in such an order that its micro-batches have
    nearly equal work, too: a pipeline waits for its longest one. Where it does not, a warning says so.
    """

    def __init__(
        self, work: Sequence[int], batch_size: int, replicas: Replicas, *, seed: int = 0, micro_batches: int = 1
    ) -> None:
        count = replicas.num_replicas
        if min(batch_size, micro_batches) < 1:
            raise PlanError(f"batch_size={batch_size} with micro_batches={micro_batches}: at least 1 of each is needed")
        super().__init__(range(len(work)), num_replicas=count, rank=replicas.rank, seed=seed, drop_last=True)
        self.work = work
        self.batch_size = batch_size
        self.micro_batches = micro_batches if batch_size % micro_batches == 0 else 1
        if self.micro_batches != micro_batches and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"micro_batches={micro_batches} does not divide batch_size={batch_size}: micro-batches of packed "
                "documents may have unequal work, so choose another number of either",
                stacklevel=2,
            )
        if not len(self):
            raise PlanError(
                f"{len(work)} rows of packed documents are fewer than one batch of {count} replicas x {batch_size} "
                "rows: use more text, shorter rows or smaller batches"
            )

    def __iter__(self) -> Iterator[int]:
        for rows in self._global_batches():
            dealt = deal([self.work[row] for row in rows], self.num_replicas)
            yield from self._in_micro_batches([rows[place] for place in dealt[self.rank]])

    def _in_micro_batches(self, rows: Sequence[int]) -> Iterator[int]:
        for part in deal([self.work[row] for row in rows], self.micro_batches):
            yield from (rows[place] for place in part)

    def _global_batches(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.work), generator=generator).tolist()
        size = self.batch_size * self.num_replicas
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]

    def imbalance(self, batches: int = 100) -> tuple[float, float]:
        """Work of the busiest replica over the mean, averaged over the first batches: as dealt, and dealt plainly."""
        dealt, plain = [], []
        for rows in islice(self._global_batches(), batches):
            work = [self.work[row] for row in rows]
            dealt.append(imbalance(work, deal(work, self.num_replicas)))
            plain.append(imbalance(work, deal_plainly(len(work), self.num_replicas)))
        return fmean(dealt), fmean(plain)

    def __len__(self) -> int:
        return len(self.work) // (self.batch_size * self.num_replicas) * self.batch_size
