"""Trainers and LightningModules for tests of the strategy: everything here can run in the rank pool."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from tiny import tiny
from torch import Tensor, nn

from lightning_afd.placement import Groups, Layout
from lightning_afd.strategies.afd import AFDStrategy
from lightning_afd.strategies.ep import EPStrategy
from lightning_afd.strategies.flowmoe import FlowMoEStrategy

Batch = dict[str, Tensor]
State = dict[str, Tensor]
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "max_epochs": 1,
}
TOGETHER: dict[str, type[EPStrategy]] = {"ep": EPStrategy, "flowmoe": FlowMoEStrategy}
"""Strategies whose ranks have attention and experts."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where a module is trained: a layout such as "2A+2F", "2flowmoe" for two ranks of that strategy, or "ref" for
    Lightning's own strategy in one process.
    """

    layout: str = "2A+2F"
    """Ranks of each of the groups, or ranks and strategy."""
    groups: Groups = 1
    micro_batches: int = 2
    precision: str = "32-true"

    @property
    def sizes(self) -> tuple[int, int]:
        """A ranks and F ranks; the same ones of a collocated strategy."""
        match = re.fullmatch(r"(\d+)A\+(\d+)F", self.layout)
        if match is None:
            ranks, _ = self.together
            return ranks, ranks
        return int(match[1]), int(match[2])

    @property
    def is_together(self) -> bool:
        """Whether each rank has attention and experts."""
        return self.layout.endswith(tuple(TOGETHER))

    @property
    def together(self) -> tuple[int, type[EPStrategy]]:
        """Ranks of a collocated strategy, and the strategy."""
        match = re.fullmatch(rf"(\d+)({'|'.join(TOGETHER)})", self.layout)
        assert match is not None, self.layout
        return int(match[1]), TOGETHER[match[2]]

    @property
    def world(self) -> int:
        """Processes that the layout needs."""
        if self.layout == "ref":
            return 1
        if self.is_together:
            return self.together[0]
        attention, ffn = self.sizes
        return Layout(attention=attention, ffn=ffn, groups=self.groups).world

    def trainer(self, strategy: Mapping[str, Any] | None = None, **options: Any) -> pl.Trainer:
        """A quiet CPU Trainer; `strategy` holds further options of the strategy."""
        options = {**QUIET, "accelerator": "cpu", "devices": self.world, "precision": self.precision, **options}
        if self.layout != "ref":
            options |= {"strategy": self._strategy(**(strategy or {})), "plugins": [LightningEnvironment()]}
        return pl.Trainer(**options)

    def _strategy(self, **options: Any) -> AFDStrategy:
        options = {"micro_batches": self.micro_batches, **options}
        if self.is_together:
            return self.together[1](**options)
        attention, ffn = self.sizes
        return AFDStrategy(**{"attention": attention, "ffn": ffn, "groups": self.groups, **options})


class Memory(Logger):
    """Keeps everything, on every rank."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep a line."""
        self.lines.append((int(step or 0), dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""


class Steps:
    """A resumable loader of ready batches, in order."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches, self.done = list(batches), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        self.done %= len(self.batches)
        while self.done < len(self.batches):
            self.done += 1
            yield self.batches[self.done - 1]

    def state_dict(self) -> dict[str, int]:
        """Batches handed out."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the batches of `state_dict`."""
        self.done = state["done"]


def tokens(rows: int, length: int = 8, *, vocab: int = 32, seed: int = 0, masked: bool = True) -> Batch:
    """One global batch: ids [rows, length] and labels, of which row r leaves out the last r mod 3 if `masked`."""
    ids = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows if masked else 0):
        labels[row, length - row % 3 :] = -100
    return {"input_ids": ids, "labels": labels}


def share(batch: Batch, replicas: int, replica: int) -> Batch:
    """Rows of one data replica."""
    return {name: tensor[replica::replicas] for name, tensor in batch.items()}


def chunks(batch: Batch, run: Run) -> list[Batch]:
    """The micro-batches of all data replicas, by torch's own rule of cutting rows."""
    replicas, _ = run.sizes
    parts = [share(batch, replicas, replica) for replica in range(replicas)]
    cut = [{name: t.tensor_split(min(run.micro_batches, len(t))) for name, t in part.items()} for part in parts]
    return [dict(zip(part, tensors, strict=True)) for part in cut for tensors in zip(*part.values(), strict=True)]


def valid(batch: Batch) -> int:
    """Labels that count in the loss of a causal language model."""
    return int((batch["labels"][:, 1:] != -100).sum())


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over valid labels, in the dtype of the logits; 0 / 0 where there are none."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Model(pl.LightningModule):
    """An ordinary LightningModule around a TinyMoE or a transformers model; it knows nothing of any strategy."""

    def __init__(
        self, model: nn.Module, train: Sequence[Batch], val: Sequence[Batch] = (), *, aux: float = 0.0
    ) -> None:
        super().__init__()
        self.model, self.batches, self.val_batches, self.aux = model, train, val, aux
        self.optimizer: Callable[..., Any] = partial(torch.optim.SGD, lr=1.0)
        self.gradients: State = {}
        """Copies of the gradients of the last optimizer step."""

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy, with the auxiliary loss where the model has one."""
        out = self.model(batch["input_ids"])
        loss = mean_loss(out.logits, batch["labels"])
        extra = getattr(out, "aux_loss", None)
        return loss if extra is None else loss + self.aux * extra

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss, logged."""
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch), batch_size=len(batch["labels"]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep what the optimizer is about to use."""
        self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> Any:
        """Plain SGD unless a test sets another one."""
        return self.optimizer(self.parameters())

    def train_dataloader(self) -> Steps:
        """Rows of this data replica."""
        return self._loader(self.batches)

    def val_dataloader(self) -> Steps:
        """Rows of this data replica."""
        return self._loader(self.val_batches)

    def _loader(self, batches: Sequence[Batch]) -> Steps:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        kwargs = kwargs or {"num_replicas": 1, "rank": 0}
        return Steps([share(batch, kwargs["num_replicas"], kwargs["rank"]) for batch in batches])


def tiny_module(steps: int = 1, rows: int = 8, val_steps: int = 0, **sizes: Any) -> Model:
    """A seeded Model of a TinyMoE with `steps` training batches, and `val_steps` ones without masked labels."""
    val = [tokens(rows - 2 * step, seed=100 + step, masked=False) for step in range(val_steps)]
    return Model(tiny(**sizes), [tokens(rows, seed=seed) for seed in range(steps)], val, aux=1.0)


def worst(ours: State, reference: State) -> tuple[float, str]:
    """The largest difference of any parameter, relative to that parameter's largest value, and its name."""
    assert ours.keys() == reference.keys()
    ratios = {name: (ours[name] - ref).abs().max() / ref.abs().max() for name, ref in reference.items()}
    return max((float(ratio), name) for name, ratio in ratios.items())
