"""What a fit is about: the shapes of its model and of a batch, found without touching either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_afd.batch import tensors_in
from lightning_afd.cost.job import PRECISIONS, Choices
from lightning_afd.errors import PlanError
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.global_batch import GlobalBatch
from lightning_afd.strategies.planning.options import Planning
from lightning_afd.strategies.seeds import random_state, set_random_state

if TYPE_CHECKING:
    import lightning.pytorch as pl

MOST_READ = 32
"""Rows that are read to see how long they are."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A batch of one data replica."""

    rows: int
    tokens: int
    """Of each row, padding included."""


def choices_of(config: AFDConfig, trainer: pl.Trainer) -> Choices:
    """What the user has chosen, as the cost model has it; raises PlanError for a precision that it doesn't know."""
    name = {"64-true": "64", "32-true": "32"}.get(str(trainer.precision), str(trainer.precision))
    if name not in PRECISIONS:
        raise PlanError(f"costs are not known for precision={trainer.precision}")
    return Choices(
        precision=PRECISIONS[name],
        shared_experts=config.shared_experts,
        shard_optimizer=config.sharding != "none",
        dedup="node" if config.dedup == "node" else "rank" if config.dedup else "none",
    )


def rows_of_fit(trainer: pl.Trainer, planning: Planning) -> Rows:
    """The batch of a replica; raises PlanError where the dataloader doesn't tell and `planning` says nothing.

    Rows of the dataset are read by index, so that no stream loses any, and no random numbers are used up. To be called
    on all ranks, as a user's train_dataloader may wait for the others.
    """
    if planning.rows and planning.tokens:
        return Rows(rows=planning.rows, tokens=planning.tokens)
    with random_numbers_untouched():
        source = trainer.fit_loop._data_source
        loader = source.dataloader() if source.is_defined() else None
        rows = planning.rows or _rows(loader)
        return Rows(rows=rows, tokens=planning.tokens or _tokens(loader, min(rows, MOST_READ)))


@contextmanager
def random_numbers_untouched() -> Iterator[None]:
    """What happens inside takes nothing from the random numbers of this process."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _rows(loader: Any) -> int:
    found = GlobalBatch.of(loader, 1, 1)
    if found is None:
        raise PlanError(
            f"{_name(loader)} does not say its batch_size: say it as planning=Planning(rows=..., tokens=...)"
        )
    return found.rows


def _tokens(loader: Any, rows: int) -> int:
    """Tokens of a row of the first `rows` of the dataset, put together as the loader does it."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise PlanError(
            f"the data of {_name(loader)} can only be read in a stream, of which nothing may get lost: say how many "
            "tokens a row has as planning=Planning(tokens=...)"
        )
    collate = getattr(loader, "collate_fn", None) or list
    batch = collate([dataset[index] for index in range(min(rows, len(dataset)))])
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    for tensor in (named, *tensors_in(batch)):
        if isinstance(tensor, Tensor) and tensor.ndim == 2 and not tensor.is_floating_point():
            return int(tensor.shape[1])
    raise PlanError("a batch has no ids of shape [rows, tokens]: say planning=Planning(tokens=...)")


def _name(loader: Any) -> str:
    return "a fit without a training dataloader" if loader is None else f"a {type(loader).__name__}"
