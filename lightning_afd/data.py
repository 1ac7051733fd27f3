"""Text as an ordinary LightningDataModule: rows of packed tokens for causal language models."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset

from lightning_afd.corpus import Corpus, Tokens, default_cache, load_corpus, pack, unigram_entropy

Batch = dict[str, torch.Tensor]


class TokenRows(Dataset[Batch]):
    """Rows of [S] tokens, each its own label: the model shifts them."""

    def __init__(self, rows: Tokens) -> None:
        self.rows = torch.from_numpy(rows).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class TextDataModule(L.LightningDataModule):
    """Packed rows of Python's own documentation, or of the user's text files, with a tokenizer trained on them.

    Batches are {"input_ids": [B, S], "labels": [B, S]} int64, with B = `batch_size` rows per data-parallel rank.
    """

    def __init__(
        self,
        *,
        files: Sequence[str] = (),
        vocab_size: int = 1024,
        seq_len: int = 128,
        batch_size: int = 8,
        val_every: int = 20,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.files = tuple(files)
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_every = val_every
        self.cache = Path(cache_dir).expanduser() if cache_dir else default_cache()
        self.corpus: Corpus | None = None

    def prepare_data(self) -> None:
        """Fill the cache, on one process per node, and log once what the corpus is."""
        corpus = self._load()
        if self.corpus is None:
            rank_zero_info(corpus.describe())

    def setup(self, stage: str | None = None) -> None:
        """Read the cache and split the blocks, on every process; later calls change nothing."""
        if self.corpus is None:
            self.corpus = self._load()
            self.train_rows, self.val_rows = pack(self.corpus.ids, self.seq_len, self.val_every)

    def _load(self) -> Corpus:
        return load_corpus(self.files, self.vocab_size, self.cache)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text; it exists after `setup`."""
        assert self.corpus is not None
        return self.corpus.tokenizer

    @property
    def entropy(self) -> float:
        """Nats per validation token of a model that knows token frequencies only: the figure to be beaten."""
        return unigram_entropy(self.train_rows, self.val_rows, self.vocab_size)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled training batches; a last incomplete batch is left out."""
        return DataLoader(TokenRows(self.train_rows), batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the validation batches in the order of the text."""
        return DataLoader(TokenRows(self.val_rows), batch_size=self.batch_size)
