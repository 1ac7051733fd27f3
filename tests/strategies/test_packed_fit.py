"""Packed documents inside a Trainer: the same rows on one device and on attention and FFN ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LM, fit_alone, fit_apart, join, largest_difference, weights
from pool import RankPool
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_afd.documents import BalancedSampler, FlattenRows, PackedRows, Replicas
from lightning_afd.model.document_masks import separate_documents

SEQ_LEN, GLOBAL_ROWS = 24, 4


def rows() -> PackedRows:
    """Twelve rows of documents of 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 31, (20,), generator=generator).tolist()
    ids = torch.randint(0, 64, (sum(lengths),), generator=generator)
    return PackedRows(ids, lengths, SEQ_LEN)


class PackedLM(LM):
    """Reads global batches of packed rows, whatever the number of replicas; the model gets the batch as it is."""

    def __init__(self, name: str) -> None:
        super().__init__([], name=name)
        separate_documents(self.model)
        self.rows_seen: list[Tensor] = []

    def train_dataloader(self) -> DataLoader[Any]:  # type: ignore[override]
        replicas = Replicas(**(self.trainer.distributed_sampler_kwargs or {}))
        size = GLOBAL_ROWS // replicas.num_replicas
        sampler = BalancedSampler(rows().work, size, replicas)
        return DataLoader(rows(), batch_size=size, sampler=sampler, collate_fn=FlattenRows())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.rows_seen.append(batch["input_ids"])
        logits = self.model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        return cross_entropy(logits[0, :-1], batch["labels"][0, 1:])


def fit(name: str, groups: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Weights and micro-batches of a rank."""
    module = PackedLM(name).double()
    fit_apart(module, 2 // groups, 2 // groups, R=3, p=groups, use_distributed_sampler=True)
    return weights(module), module.rows_seen


@pytest.mark.parametrize(("name", "groups"), [("qwen3_moe", 1), ("gpt_oss", 1), ("deepseek_v3", 2)])
def test_a_fit_on_packed_documents_is_that_of_one_device(pool: RankPool, name: str, groups: int) -> None:
    alone = PackedLM(name).double()
    fit_alone(alone)
    parts = pool.run(fit, 4, name, groups)
    assert largest_difference(join([held for held, _ in parts]), weights(alone)) < 1e-6
    steps = len(alone.rows_seen)
    assert steps >= 2 and all(batch.shape == (1, SEQ_LEN * GLOBAL_ROWS) for batch in alone.rows_seen)
    replica = parts[0][1]
    assert len(replica) == 3 * steps
    assert len({micro_batch.shape for micro_batch in replica}) > 1
