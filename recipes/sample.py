"""Writing text with a model that may be spread over many ranks."""

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to continue a text."""

    tokens: int = 24
    """how many to write"""
    temperature: float = 0.7
    """0 always takes the likeliest token"""
    window: int = 128
    """tokens that the model sees, the same number at every step: earlier ones drop out, missing ones are line breaks"""


class Writer(L.Callback, Dataset[Batch]):
    """The data and the callback of one prediction loop: batch t is the window after t written tokens.

    A predicted token is chosen on rank 0 and broadcast, so all ranks go on with the same window. It works because a
    loader without workers makes batch t + 1 only when batch t is done.
    """

    def __init__(self, context: list[int], sampling: Sampling) -> None:
        self.window = torch.tensor(context)[-sampling.window :]
        self.sampling = sampling
        self.written: list[int] = []
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return self.sampling.tokens

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self.window}

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Append one token; called on every rank, `outputs` [1, V] counts on rank 0 only."""
        token = trainer.strategy.broadcast(self.choose(outputs[0]) if trainer.is_global_zero else None)
        self.written.append(token)
        self.window = torch.cat((self.window[1:], torch.tensor([token])))

    def choose(self, logits_V: torch.Tensor) -> int:
        """Return a token id, drawn at the temperature."""
        if self.sampling.temperature == 0:
            return int(logits_V.argmax())
        probability_V = torch.softmax(logits_V.float().cpu() / self.sampling.temperature, dim=-1)
        return int(torch.multinomial(probability_V, 1, generator=self.generator))


def sample(trainer: L.Trainer, module: L.LightningModule, tokenizer: Tokenizer, prompt: str, sampling: Sampling) -> str:
    """Return the prompt and what the model writes after it; a collective call, with any strategy."""
    context = tokenizer.encode("\n").ids * sampling.window + tokenizer.encode(prompt).ids
    writer = Writer(context, sampling)
    same_on_all_ranks = DistributedSampler(writer, num_replicas=1, rank=0, shuffle=False)
    trainer.callbacks.append(writer)
    try:
        trainer.predict(module, DataLoader(writer, sampler=same_on_all_ranks), return_predictions=False)
    finally:
        trainer.callbacks.remove(writer)
    return prompt + tokenizer.decode(writer.written)
