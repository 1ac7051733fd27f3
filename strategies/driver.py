"""Turn Lightning's calls of a strategy (training_step, validation_step ...) into steps of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_afd.batch import loss_weight, merge_outputs, rows_or_one, split_batch, tensors_in
from lightning_afd.engine import Engine
from lightning_afd.errors import PlanError
from lightning_afd.gradients import GradientStash, installing_loss, sum_over_replicas
from lightning_afd.model.place import is_replicated, owned_parameters
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.segments import UserStep
from lightning_afd.strategies.loaders import has_no_rows
from lightning_afd.strategies.metric_objects import MetricObjects
from lightning_afd.strategies.seeds import Seeds
from lightning_afd.strategies.step_log import Exchange, Recorder

if TYPE_CHECKING:
    import lightning.pytorch as pl

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class StepStats:
    """Figures of the last training step, equal on all ranks."""

    loss: float
    tokens: float
    """Tokens of all A ranks."""
    seconds: float
    """Of the slowest rank."""
    exposed: float
    """Mean share of their step in which A ranks waited for messages (0..1)."""


class Driver:
    """Runs a module's steps on this rank: as coroutines on A ranks, as expert work on F ranks."""

    def __init__(
        self, engine: Engine, module: pl.LightningModule, seeds: Seeds, wish_of_rank: Callable[[], float]
    ) -> None:
        self.engine = engine
        self.stats: StepStats | None = None
        self.wish = 0.0
        """The largest wish of all ranks at the end of the last batch (see AgreedSignals)."""
        self._wish_of_rank = wish_of_rank
        self._module = module
        self._parameters = [parameter for _, parameter in owned_parameters(module)]
        self._stash = GradientStash(self._parameters)
        self.metrics = MetricObjects(module, engine.collectives, speaks=engine.has_tail)
        """Metric objects that the module has logged."""
        self._recorder = Recorder(self.metrics)
        self._seeds = seeds
        self._exchange = Exchange(engine.collectives)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank holds."""
        return self._parameters

    def train(self, args: Sequence[Any], around: Around, last_of_window: Callable[[], bool], loss_scale: float) -> Any:
        """One batch, forward and backward; returns a step output whose loss installs the gradients in its backward.

        `loss_scale` multiplies the loss in the pipeline's backward; it is taken out where gradients are installed.
        """
        start = time.perf_counter()
        pieces = self._split(args[0]) if self.engine.is_attention else []
        weights = [self._weight(piece) for piece in pieces]
        agreed = self.engine.agree(len(pieces), sum(weights) if self.engine.has_tail else 0.0)
        scale = 1.0 if self._sums else 1.0 / max(agreed.total, 1e-300)
        steps = [
            replace(
                self._user_step(self._module.training_step, (piece, *args[1:]), around, weight * scale),
                seed=self._seeds.next(),
                loss_scale=loss_scale,
            )
            for piece, weight in zip(pieces, weights, strict=True)
        ]
        self._stash.begin()
        with self._recorder.capture(self._module):
            results = self.engine.run(steps, agreed.micro_batches, training=True)
        self._stash.end()
        done = zip(results, steps, strict=True) if self.engine.has_tail else ()
        losses = [_loss_value(result) * step.weight for result, step in done if step.weight]
        with around():  # where Lightning itself would log: metrics take the default dtype of this context
            own = (sum(losses, torch.zeros(())), time.perf_counter() - start)
            loss = self._share(*own, speaks=self.engine.has_tail, by_rows=False)
        made = installing_loss(loss, partial(self._install, loss_scale, last_of_window))
        return merge_outputs(results, weights, made) if self.engine.has_tail else made

    def evaluate(self, function: Callable[..., Any], args: Sequence[Any], around: Around) -> Any:
        """One batch of validation or test, forward only; returns the user's output, or None without rows here."""
        with self._recorder.capture(self._module):
            results = self._run_forward(function, args, around)
        with around():
            speaks = self.engine.has_tail and not has_no_rows(args[0])
            self._share(torch.zeros(()), 0.0, speaks=speaks, by_rows=True)
        return results[0] if results else None

    def predict(self, function: Callable[..., Any], args: Sequence[Any], around: Around) -> Any:
        """One batch of predict; returns the user's output, or None without rows here."""
        results = self._run_forward(function, args, around)
        return results[0] if results else None

    def _run_forward(self, function: Callable[..., Any], args: Sequence[Any], around: Around) -> list[Any]:
        has_rows = self.engine.is_attention and not has_no_rows(args[0])
        if not has_rows and any(True for _ in tensors_in(args[0])):
            raise PlanError(
                "an attention rank has a batch from one loader of a CombinedLoader and none from another, as their "
                "batches cannot be shared evenly: evaluate them one after another (mode='sequential')"
            )
        steps = [self._user_step(function, args, around, 1.0)] if has_rows else []
        return self.engine.run(steps, 1, training=False)

    def _split(self, batch: Any) -> list[Any]:
        hook = getattr(self._module, "afd_split", None)
        count = self.engine.plan.micro_batches
        pieces = split_batch(batch, count) if hook is None else list(hook(batch, count))
        if not 1 <= len(pieces) <= count:
            raise PlanError(f"afd_split returned {len(pieces)} micro-batches: return 1 to {count}")
        return pieces

    def _weight(self, piece: Any) -> float:
        hook = getattr(self._module, "afd_weight", None)
        if hook is not None:
            return float(hook(piece))
        return (1.0 if loss_weight(piece) else 0.0) if self._sums else loss_weight(piece)

    @property
    def _sums(self) -> bool:
        reduction = getattr(self._module, "afd_loss_reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise MisconfigurationException(f"afd_loss_reduction={reduction!r}: choose 'mean' or 'sum'")
        return bool(reduction == "sum")

    def _user_step(self, function: Callable[..., Any], args: Sequence[Any], around: Around, weight: float) -> UserStep:
        rows = rows_or_one(args[0])

        @contextmanager
        def inside() -> Iterator[None]:
            with around(), self._recorder.micro_batch(weight, rows):
                yield

        return UserStep(function=partial(function, *args), around=inside, weight=weight, loss_of=_loss_of)

    def _share(self, loss: Tensor, seconds: float, *, speaks: bool, by_rows: bool) -> Tensor:
        """Exchange loss, figures and logged values; replays the log and returns the loss of the global batch."""
        head = [float(loss), self.engine.tokens, seconds, self.engine.exposed(), self._wish_of_rank()]
        heads, logged = self._exchange.share(head, self._recorder, speaks=speaks, by_rows=by_rows)
        for item in logged:
            item.replay(self._module, self.metrics)
        attention = [head for head in heads if head[1] > 0] or heads
        total = sum(head[0] for head in heads)
        self.wish = max(head[4] for head in heads)
        self.stats = StepStats(
            loss=total,
            tokens=sum(head[1] for head in heads),
            seconds=max(head[2] for head in heads),
            exposed=sum(head[3] for head in attention) / len(attention),
        )
        return torch.tensor(total, dtype=loss.dtype, device=self._module.device)

    def _install(self, loss_scale: float, last_of_window: Callable[[], bool], scale: Tensor) -> None:
        self._stash.install(scale / loss_scale)
        if last_of_window():
            sum_over_replicas([p for p in self._parameters if is_replicated(p)], self.engine.collectives)


def _loss_of(result: Any) -> Tensor:
    """The loss in what a training_step returned; MisconfigurationException where there is none."""
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise MisconfigurationException(
            f"training_step returned {what}: strategy afd needs a scalar loss, or a dict with one under 'loss'; "
            "to skip a batch return a loss of zero"
        )
    return loss


def _loss_value(result: Any) -> Tensor:
    return _loss_of(result).detach().cpu()
