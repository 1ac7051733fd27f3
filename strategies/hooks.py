"""Which of the user's hooks run where.

Hooks that get a batch run on A group 0, which has batches with rows, and not for a batch that this rank does not have.
Those at the end of an epoch look at what steps left behind, so they run where steps end: on A group 0, or on F ranks
with tails. What they log is joined over these ranks and logged on all ranks, so that monitors agree. All other hooks
run on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torchmetrics import Metric

from lightning_afd.batch import rows_or_one
from lightning_afd.engine import Engine
from lightning_afd.namespace import namespace_of
from lightning_afd.strategies.loaders import has_no_rows
from lightning_afd.strategies.metric_objects import MetricObjects
from lightning_afd.strategies.step_log import Exchange, Recorder

if TYPE_CHECKING:
    import lightning.pytorch as pl

_STAGES = ("train", "validation", "test", "predict")
_EPOCH_HOOKS = tuple(f"on_{stage}_epoch_end" for stage in _STAGES)
_BATCH_HOOKS = tuple(f"on_{stage}_batch_{edge}" for stage in _STAGES for edge in ("start", "end"))
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_WRITERS = ("write_on_batch_end", "write_on_epoch_end")
_SKIP_EPOCH = -1
"""What on_train_batch_start returns to skip the rest of an epoch."""


class UserHooks:
    """Stands in for hooks of one module, its datamodule and prediction writers until `remove`.

    `guard` runs a function that talks to other ranks; `group` is the process group of the ranks where steps end.
    """

    def __init__(
        self, module: pl.LightningModule, engine: Engine, guard: Callable[..., Any], group: Any, metrics: MetricObjects
    ) -> None:
        self._module = module
        self._engine = engine
        self._guard = guard
        self._logged_metrics = metrics
        self._undo: list[Callable[[], None]] = []
        for name in _EPOCH_HOOKS:
            self._replace(module, name, partial(self._joined, batch_at=None))
        for name in _BATCH_HOOKS:
            self._replace(module, name, partial(self._joined, batch_at=_place_of_batch(name)))
        for owner in (module, getattr(module.trainer, "datamodule", None)):
            for name in _TRANSFER_HOOKS:
                self._replace(owner, name, _with_rows)
        self._silence_writers()
        self._metrics = [m for m in module.modules() if isinstance(m, Metric) and m.process_group is None]
        for metric in self._metrics:
            metric.process_group = group

    def remove(self) -> None:
        """Give everybody their own hooks and metrics back."""
        for undo in reversed(self._undo):
            undo()
        for metric in self._metrics:
            metric.process_group = None

    def _replace(self, owner: Any, name: str, substitute: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        is_overridden = namespace_of(self._module).pytorch("utilities.model_helpers").is_overridden
        if owner is not None and is_overridden(name, owner):
            self._put(owner, name, substitute(getattr(owner, name)))

    def _put(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
        owner.__dict__[name] = hook
        self._undo.append(lambda: (owner.__dict__.pop(name), owner.__dict__.update(before))[1])

    def _silence_writers(self) -> None:
        """Prediction writers have nothing to write on a rank, or for a batch, without rows."""
        writer = namespace_of(self._module).pytorch("callbacks").BasePredictionWriter
        for callback in self._module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, writer):
                for name in _WRITERS:
                    self._put(callback, name, self._only_with_rows(getattr(callback, name)))

    def _only_with_rows(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def written(*args: Any) -> None:
            if self._engine.leads and not any(map(has_no_rows, args)):
                hook(*args)

        return written

    def _joined(self, hook: Callable[..., Any], *, batch_at: int | None) -> Callable[..., Any]:
        """The hook, run where there is something to see; what it logs and returns is that of all ranks."""
        exchange = Exchange(self._engine.collectives)

        @wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            rows = None if batch_at is None else _rows(args[batch_at])
            if rows is None:
                self._guard(self._logged_metrics.compute_together)
            return self._guard(self._run, exchange, rows, partial(hook, *args, **kwargs))

        return run

    def _run(self, exchange: Exchange, rows: int | None, hook: Callable[[], Any]) -> Any:
        """`rows` of the hook's batch, which A ranks of group 0 bring; None at the end of an epoch, where tails ran."""
        runs = self._engine.has_tail if rows is None else self._engine.leads and rows > 0
        recorder, answer = Recorder(self._logged_metrics), None
        if runs:
            with recorder.capture(self._module), recorder.micro_batch(1.0, rows or 1):
                answer = hook()
        skips = isinstance(answer, int) and answer == _SKIP_EPOCH
        heads, logged = exchange.share([float(skips)], recorder, speaks=runs, by_rows=True)
        for item in logged:
            item.replay(self._module, self._logged_metrics)
        return _SKIP_EPOCH if any(head[0] for head in heads) else answer


def _rows(batch: Any) -> int:
    return 0 if has_no_rows(batch) else rows_or_one(batch)


def _place_of_batch(hook: str) -> int:
    """Index of the batch in a hook's arguments; those at the end of a batch get the step's output first."""
    return 1 if hook.endswith("_end") else 0


def _with_rows(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that returns its batch: what stands in for one goes through untouched."""

    @wraps(hook)
    def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch if has_no_rows(batch) else hook(batch, *args, **kwargs)

    return run
