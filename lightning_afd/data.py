"""Text as an ordinary LightningDataModule: rows of packed tokens for causal language models."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset

from lightning_afd.corpus import (
    Corpus,
    Documents,
    Tokens,
    default_cache,
    divide_documents,
    load_corpus,
    pack,
    read_tokenizer,
    unigram_entropy,
)
from lightning_afd.documents import BalancedSampler, FlattenRows, PackedRows, Replicas
from lightning_afd.errors import PlanError

Batch = dict[str, Any]
PACKINGS = ("blocks", "documents")


class TokenRows(Dataset[Batch]):
    """Rows of [S] tokens, each its own label: the model shifts them."""

    def __init__(self, rows: Tokens) -> None:
        self.rows = torch.from_numpy(rows).long()

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self) -> torch.Tensor:
        """All of them."""
        return self.rows.flatten()

    def targets(self) -> torch.Tensor:
        """Those that a model predicts: all but the first one of each row."""
        return self.rows[:, 1:].flatten()

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class TextDataModule(L.LightningDataModule):
    """Packed rows of Python's own documentation, or of the user's text files.

    The tokenizer is that of `tokenizer`, a Hugging Face folder or its tokenizer.json, else one with `vocab_size` tokens
    that is trained on the text.

    With `packing="blocks"` a row is a piece of the text: batches are {"input_ids": [B, S], "labels": [B, S]} int64,
    with B = `batch_size` rows per data-parallel rank. With "documents" a row holds documents that don't see one
    another, ranks have nearly equal work in attention, and a batch has its rows in a single one, [1, B * S]
    (`FlattenRows`).
    """

    def __init__(
        self,
        *,
        files: Sequence[str] = (),
        vocab_size: int = 1024,
        seq_len: int = 128,
        batch_size: int = 8,
        packing: str = "blocks",
        val_every: int = 20,
        cache_dir: str | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        if packing not in PACKINGS:
            raise PlanError(f"data.packing={packing} is not a choice; choices: {', '.join(PACKINGS)}")
        self.save_hyperparameters()
        self.files = tuple(files)
        self._given = read_tokenizer(tokenizer) if tokenizer else None
        self.vocab_size = self._given.get_vocab_size() if self._given else vocab_size
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.by_document = packing == "documents"
        self.val_every = val_every
        self.cache = Path(cache_dir).expanduser() if cache_dir else default_cache()
        self.corpus: Corpus | None = None

    def prepare_data(self) -> None:
        """Fill the cache, on one process per node, and log once what the corpus is."""
        corpus = self._load()
        if self.corpus is None:
            rank_zero_info(corpus.describe())

    def setup(self, stage: str | None = None) -> None:
        """Read the cache and divide the text, on every process; later calls change nothing."""
        if self.corpus is not None:
            return
        self.corpus = self._load()
        if self.by_document:
            parts = divide_documents(self.corpus, self.seq_len, self.val_every)
            self.train_rows, self.val_rows = (self._packed(part) for part in parts)
        else:
            blocks = pack(self.corpus.ids, self.seq_len, self.val_every)
            self.train_rows, self.val_rows = (TokenRows(rows) for rows in blocks)

    def _load(self) -> Corpus:
        return load_corpus(self.files, self.vocab_size, self.cache, by_document=self.by_document, tokenizer=self._given)

    def _packed(self, documents: Documents) -> PackedRows:
        return PackedRows(torch.from_numpy(documents.ids).long(), documents.lengths.tolist(), self.seq_len)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text; it exists after `setup`."""
        assert self.corpus is not None
        return self.corpus.tokenizer

    @property
    def entropy(self) -> float:
        """Nats per validation token of a model that knows token frequencies only: the figure to be beaten."""
        return unigram_entropy(self.train_rows.tokens().numpy(), self.val_rows.targets().numpy(), self.vocab_size)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled training batches; a last incomplete batch is left out."""
        rows = self.train_rows
        if isinstance(rows, PackedRows):
            return DataLoader(
                rows, batch_size=self.batch_size, sampler=self._balanced(rows), collate_fn=FlattenRows(), drop_last=True
            )
        return DataLoader(rows, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def _balanced(self, rows: PackedRows) -> BalancedSampler:
        replicas = Replicas(**((self.trainer and self.trainer.distributed_sampler_kwargs) or {}))
        arrangement = getattr(self.trainer and self.trainer.strategy, "arrangement", None)
        sampler = BalancedSampler(
            rows.work,
            self.batch_size,
            replicas,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            micro_batches=getattr(arrangement, "micro_batches", 1),
        )
        said = f"packed documents: {len(rows)} rows of {self.seq_len} tokens"
        if replicas.num_replicas > 1:
            dealt, plain = sampler.imbalance()
            said += f"; squared lengths of the busiest replica: {dealt:.2f} x the mean, {plain:.2f} x if dealt plainly"
        rank_zero_info(said)
        return sampler

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches in the order of the text."""
        collate = FlattenRows() if self.by_document else None
        return DataLoader(self.val_rows, batch_size=self.batch_size, collate_fn=collate)
