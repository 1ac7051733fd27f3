"""Dataloaders of a job in which only A ranks hold data: F ranks get a stand-in of the same length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_afd.errors import PlanError
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.transport.base import Collectives

_BATCH_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    *(f"on_{stage}_batch_{edge}" for stage in ("train", "validation", "test", "predict") for edge in ("start", "end")),
)


class EmptyBatches:
    """Yields `length` empty batches."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter({} for _ in range(self._length))


class FirstBatches:
    """The first `length` batches of a loader; everything else (sampler, dataset, state) is the loader's own.

    Raises PlanError where the loader ends early, as the other ranks count on its length.
    """

    def __init__(self, loader: Any, length: int) -> None:
        self._loader = loader
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for number in range(self._length):
            try:
                batch = next(batches)
            except StopIteration:
                raise PlanError(
                    f"a {type(self._loader).__name__} ended after {number} batches, but its len() promised "
                    f"{len(self._loader)}: other ranks count on it, so correct __len__"
                ) from None
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def agree_on_length(loader: Any, collectives: Collectives, *, is_attention: bool) -> Any:
    """Collective: the loader of an A rank, cut to the shortest of all A ranks, or an F rank's stand-in."""
    length = _sized_length(loader)
    lengths = [
        row[1] for row in collectives.all_gather([float(is_attention), -1.0 if length is None else length]) if row[0]
    ]
    if min(lengths) < 0:
        raise MisconfigurationException(
            f"strategy afd needs dataloaders with a length, but {type(loader).__name__} has none: "
            "wrap the IterableDataset so that it defines __len__"
        )
    shortest = int(min(lengths))
    if shortest != max(lengths):
        rank_zero_warn(
            f"attention ranks have between {shortest} and {int(max(lengths))} batches: "
            f"every rank stops after {shortest}"
        )
    if not is_attention:
        return EmptyBatches(shortest)
    return FirstBatches(loader, shortest)


def _sized_length(loader: Any) -> int | None:
    """None where it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def silence_batch_hooks(module: Any) -> None:
    """On F ranks: the user's hooks that take a batch would see an empty one, so they do nothing there."""
    for name in _BATCH_HOOKS:
        if name not in module.__dict__:
            module.__dict__[name] = _pass_batch


def restore_batch_hooks(module: Any) -> None:
    """Undo `silence_batch_hooks`."""
    for name in _BATCH_HOOKS:
        if module.__dict__.get(name) is _pass_batch:
            del module.__dict__[name]


def _pass_batch(*args: Any, **kwargs: Any) -> Any:
    """Hand the batch on, where the hook is one that returns it."""
    return next((arg for arg in args if isinstance(arg, dict) and not arg), kwargs.get("batch"))
