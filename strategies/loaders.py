"""Dataloaders of a job in which only A ranks hold data: all ranks go through the same number of batches.

Training ends with the shortest A rank. Evaluation goes on to the longest one: the others take part with no rows, as F
ranks always do. What stands in for a batch on a rank without one is `NoBatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_afd.errors import PlanError
from lightning_afd.strategies.samplers import use_own_batches

if TYPE_CHECKING:
    import lightning.pytorch as pl

Gather = Callable[[list[float]], list[list[float]]]
"""Collective: every rank's numbers, by rank."""

_END = object()
_SET_BY_LIGHTNING = ("worker_init_fn", "_iterator")
"""For `seed_everything(workers=True)`, and None once worker processes have been ended."""


class NoBatch:
    """Stands for the batch of a rank that has none: an F rank, or an A rank whose evaluation data has ended."""

    def __repr__(self) -> str:
        return "NoBatch()"


def has_no_rows(batch: Any) -> bool:
    """Whether a batch, or a part of one from several loaders, is a NoBatch."""
    if isinstance(batch, Mapping):
        return any(map(has_no_rows, batch.values()))
    return any(map(has_no_rows, batch)) if isinstance(batch, (list, tuple)) else isinstance(batch, NoBatch)


class Epoch(Protocol):
    """Where the loop is that reads the loaders."""

    @property
    def done(self) -> int:
        """Batches of this epoch behind it, also those before a resume."""

    @property
    def is_over(self) -> bool:
        """Whether the last batch of the epoch was handed out."""


@dataclass(frozen=True)
class EvaluationEpoch:
    """One that always begins at its first batch."""

    done: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class TrainingEpoch:
    """What the loop of a fit counts."""

    trainer: pl.Trainer

    @property
    def done(self) -> int:
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    @property
    def is_over(self) -> bool:
        return self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which loaders a rank reads, and how it agrees with the others."""

    replicas: int
    """A ranks of a group."""
    replica: int
    """Index of this A rank."""
    is_attention: bool
    training: bool
    gather: Gather
    epoch: Epoch = EvaluationEpoch()

    def heads(self, *mine: float) -> list[list[float]]:
        """Collective: the numbers of all A ranks."""
        return [row[1:] for row in self.gather([float(self.is_attention), *mine]) if row[0]]


class SharedLoader:
    """The batches of a loader that all ranks agree on; everything else (sampler, dataset, state) is the loader's own.

    On F ranks `loader` is None. `batches` counts those of this rank since the start of the last epoch.
    """

    def __init__(self, loader: Any, place: Place, *, stateful: bool) -> None:
        self._loader = loader
        self._place = place
        self.batches = 0
        self._starts_anew = False
        """Whether the epoch has ended before the loader: its position is not where the next epoch begins."""
        if stateful:  # attributes of the instance: whether they exist is asked for without __getattr__
            self.state_dict = self._state
            self.load_state_dict = self._restore

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning sets some attributes of a loader, and expects them where it reads them."""
        if name in _SET_BY_LIGHTNING:
            setattr(self._loader, name, value)
        else:
            super().__setattr__(name, value)

    def _own(self) -> Iterator[Any]:
        self.batches, self._starts_anew = 0, False
        return iter(()) if self._loader is None else iter(self._loader)

    def _state(self) -> dict[str, Any]:
        return {} if self._loader is None or self._starts_anew else self._loader.state_dict()

    def _restore(self, state: dict[str, Any]) -> None:
        if self._loader is not None and state:
            self._loader.load_state_dict(state)

    def _given(self, batch: Any) -> Any:
        """The batch, or what stands in for it; a prediction writer finds no rows of a stand-in."""
        if batch is not _END:
            self.batches += 1
            return batch
        seen = getattr(getattr(self._loader, "batch_sampler", None), "seen_batch_indices", None)
        if seen is not None:
            seen.append([])
        return NoBatch()


class SizedLoader(SharedLoader):
    """`length` batches, of which this rank has `own`; raises PlanError where it has fewer than it promised."""

    def __init__(self, loader: Any, place: Place, *, stateful: bool, length: int, own: int) -> None:
        super().__init__(loader, place, stateful=stateful)
        self._length = length
        self._promised = own
        self._last = own - 1 if stateful and loader is not None and own == len(loader) else None
        """Number of the batch with which the loader itself is over."""
        self._ended = False
        """Whether the loader has seen its end, so that its state is that of a finished epoch."""
        self._behind = 0
        """Batches of the next epoch that are behind it, as it is resumed."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches, start = self._own(), self._behind
        self._behind, self._ended = 0, False
        for number in range(start, self._length):
            batch = next(batches, _END) if number < self._promised else _END
            if batch is _END and number < self._promised:
                raise PlanError(
                    f"a {type(self._loader).__name__} ended after {number} batches, but its len() promised "
                    f"{self._promised}: other ranks count on it, so correct __len__"
                )
            if number == self._last:
                self._ended = next(batches, _END) is _END
            yield self._given(batch)

    def _state(self) -> dict[str, Any]:
        self._starts_anew = self._place.epoch.is_over and not self._ended
        return super()._state()

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._behind = self._place.epoch.done % max(1, self._length) if state else 0


class UnsizedLoader(SharedLoader):
    """Batches of a loader without a length: before each one the ranks ask each other who has another one.

    Lightning fetches one batch ahead where it knows no length; the state that is saved is the one before that batch.
    """

    def __init__(self, loader: Any, place: Place, *, stateful: bool) -> None:
        super().__init__(loader, place, stateful=stateful)
        self._stateful = stateful and loader is not None
        self._before: dict[str, Any] | None = None
        self._warned = False

    def __len__(self) -> int:
        raise TypeError("a loader without a length")

    def __iter__(self) -> Iterator[Any]:
        batches = self._own()
        while True:
            before = self._loader.state_dict() if self._stateful and self.batches else None
            batch = next(batches, _END)
            self._before = None if batch is _END else before
            having = [has for (has,) in self._place.heads(float(batch is not _END))]
            if not (all if self._place.training else any)(having):
                self._starts_anew = batch is not _END
                self._warn(any(having))
                return
            yield self._given(batch)

    def _warn(self, uneven: bool) -> None:
        if uneven and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"an attention rank has no batch after {self.batches}, another one has: the epoch ends for all ranks"
            )

    def _state(self) -> dict[str, Any]:
        return super()._state() if self._before is None or self._starts_anew else self._before


def share_loader(loader: Any, place: Place) -> SharedLoader:
    """Collective: what a rank iterates over in the place of `loader`.

    Where evaluation rows are divided by a DistributedSampler, no row is repeated to make ranks equal.
    """
    if not place.training and place.is_attention:
        use_own_batches(loader, place.replicas, place.replica)
    length = _sized_length(loader)
    is_stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    heads = place.heads(-1.0 if length is None else length, float(is_stateful))
    lengths, stateful = [int(head[0]) for head in heads], bool(heads[0][1])
    mine = loader if place.is_attention else None
    if min(lengths) < 0:
        return UnsizedLoader(mine, place, stateful=is_stateful if place.is_attention else stateful)
    agreed = min(lengths) if place.training else max(lengths)
    if place.training and agreed != max(lengths):
        rank_zero_warn(
            f"attention ranks have between {agreed} and {max(lengths)} batches: every rank stops after {agreed}"
        )
    own = min(length or 0, agreed) if place.is_attention else 0
    return SizedLoader(mine, place, stateful=is_stateful if place.is_attention else stateful, length=agreed, own=own)


def _sized_length(loader: Any) -> int | None:
    """None where it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
