"""Turn Lightning's calls of a strategy (training_step, validation_step ...) into steps of the engine.

A LightningModule may say how its batches are cut and weighed; attention ranks ask it, once per training batch:

- `afd_split(batch, micro_batches) -> list`: the batch as 1 to `micro_batches` batches, in order; default `split_batch`.
- `afd_weight(batch) -> float`: w of a micro-batch; default `loss_weight`. The batch's loss is sum(w loss) / sum(w) over
  the micro-batches of all A ranks, and w = 0 leaves one out.
- `afd_loss_reduction: str`: "mean" by default; with "sum" losses are sums over their micro-batch and are added, each
  times its w (1 by default, or 0 without labels).

Raises PlanError for another number of batches, MisconfigurationException for another reduction.
"""

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
from lightning_afd.gradients import installing_loss
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.namespace import MisconfigurationException, namespace_of
from lightning_afd.reduction import StepGradients
from lightning_afd.segments import UserStep
from lightning_afd.strategies.loaders import has_no_rows
from lightning_afd.strategies.metric_objects import MetricObjects
from lightning_afd.strategies.seeds import Seeds
from lightning_afd.strategies.step_log import Exchange, Key, Logged, Recorder
from lightning_afd.strategies.tails import NOTHING, TailErrands, Work
from lightning_afd.strategies.tuning import ChunkSize

if TYPE_CHECKING:
    import lightning.pytorch as pl

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class StepStats:
    """Figures of the last training step, equal on all ranks."""

    loss: float
    """Of the global batch, the router z-loss with its coefficient included."""
    tokens: float
    """Tokens of all A ranks."""
    seconds: float
    """Of the slowest rank."""
    exposed: float
    """Mean share of their step in which A ranks waited for messages (0..1)."""
    z_loss: float = 0.0
    """Router z-loss, without its coefficient; 0 where it is off."""


class Driver:
    """Runs a module's steps on this rank: as coroutines on A ranks, as expert work (and tails) on F ranks."""

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        seeds: Seeds,
        wish_of_rank: Callable[[], float],
        chunk_size: ChunkSize,
    ) -> None:
        self.engine = engine
        self.stats: StepStats | None = None
        self.wish = 0.0
        """The largest wish of all ranks at the end of the last batch (see AgreedSignals)."""
        self.chunk_size = chunk_size
        """S_p, and what its search has found."""
        self._seconds: float | None = None  # of the last batch that ended a window, up to its summed gradients
        self._wish_of_rank = wish_of_rank
        self._module = module
        self._parameters = [parameter for _, parameter in owned_parameters(module)]
        self._gradients = StepGradients(
            self._parameters, dense_parameters(module), engine.sums, engine.collectives, engine.runtime.reducing
        )
        move = namespace_of(module).fabric("utilities.apply_func").move_data_to_device
        self._errands = TailErrands(engine, partial(move, device=module.device))
        self._has_worked = False
        self.metrics = MetricObjects(module, engine)
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
        self.chunk_size.next_step(self._seconds)
        self._seconds = None
        start = time.perf_counter()
        pieces = self._split(args[0]) if self.engine.is_attention else []
        weights = [self._weight(piece) for piece in pieces]
        agreed = self.engine.agree(len(pieces), sum(weights) if self.engine.leads else 0.0)
        scale = 1.0 if self._sums else 1.0 / max(agreed.total, 1e-300)
        work = Work(
            args=[(piece, *args[1:]) for piece in pieces],
            weights=[weight * scale for weight in weights],
            seeds=[self._seeds.next() for _ in pieces],
            loss_scale=loss_scale,
        )
        last = last_of_window()
        self._gradients.begin(last=last)
        with self._recorder.capture(self._module):
            results = self._run(partial(self._steps, self._module.training_step, around), work, agreed.micro_batches)
        self._gradients.end()
        done = zip(results, work.weights, strict=True) if self.engine.leads else ()
        losses = [_loss_value(result) * weight for result, weight in done if weight]
        with around():  # where Lightning itself would log: metrics take the default dtype of this context
            own = (sum(losses, torch.zeros(())), time.perf_counter() - start)
            loss = self._share(*own, speaks=self.engine.has_tail, by_rows=False)
            self._log_z_loss()
        made = installing_loss(loss, partial(self._install, start, loss_scale, last))
        return merge_outputs(results, weights, made) if self.engine.leads else made

    def evaluate(self, function: Callable[..., Any], args: Sequence[Any], around: Around) -> Any:
        """One batch of validation or test, forward only; returns the user's output, or None without rows here."""
        with self._recorder.capture(self._module):
            results = self._run_forward(function, args, around)
        with around():
            self._share(torch.zeros(()), 0.0, speaks=self._has_worked, by_rows=True)
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
        work = Work(args=[tuple(args)], weights=[1.0], seeds=[None]) if has_rows else NOTHING
        return self._run(partial(self._steps, function, around), work, 1, training=False)

    def _run(
        self, steps_of: Callable[[Work], list[UserStep]], work: Work, micro_batches: int, *, training: bool = True
    ) -> list[Any]:
        """Run the steps of this rank and the tails that others ask of it; returns what its own steps returned."""
        asked = self._errands.pass_on(work)
        self._has_worked = self.engine.has_tail and any(one.args for one in (work, *asked))
        tails = [steps_of(other) for other in asked]
        results = self.engine.run(steps_of(work), micro_batches, training=training, tails=tails)
        return self._errands.bring_back(results, self.engine.tail_results)

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

    def _steps(self, function: Callable[..., Any], around: Around, work: Work) -> list[UserStep]:
        micro_batches = zip(work.args, work.weights, work.seeds, strict=True)
        return [
            replace(
                self._user_step(function, args, around, weight),
                seed=seed,
                loss_scale=work.loss_scale,
                router_z_loss=self.engine.plan.router_z_loss,
            )
            for args, weight, seed in micro_batches
        ]

    def _user_step(self, function: Callable[..., Any], args: Sequence[Any], around: Around, weight: float) -> UserStep:
        rows = rows_or_one(args[0])

        @contextmanager
        def inside() -> Iterator[None]:
            with around(), self._recorder.micro_batch(weight, rows):
                yield

        return UserStep(function=partial(function, *args), around=inside, weight=weight, loss_of=_loss_of)

    def _share(self, loss: Tensor, seconds: float, *, speaks: bool, by_rows: bool) -> Tensor:
        """Exchange loss, figures and logged values; replays the log and returns the loss of the global batch."""
        engine = self.engine
        head = [float(loss), engine.tokens, seconds, engine.exposed(), self._wish_of_rank(), engine.z_loss()]
        heads, logged = self._exchange.share(head, self._recorder, speaks=speaks, by_rows=by_rows)
        for item in logged:
            item.replay(self._module, self.metrics)
        attention = [head for head in heads if head[1] > 0] or heads
        z_loss = sum(head[5] for head in heads)
        total = sum(head[0] for head in heads) + engine.plan.router_z_loss * z_loss
        self.wish = max(head[4] for head in heads)
        self.stats = StepStats(
            loss=total,
            tokens=sum(head[1] for head in heads),
            seconds=max(head[2] for head in heads),
            exposed=sum(head[3] for head in attention) / len(attention),
            z_loss=z_loss,
        )
        return torch.tensor(total, dtype=loss.dtype, device=self._module.device)

    def _log_z_loss(self) -> None:
        if self.engine.plan.router_z_loss and self.stats is not None:
            key = Key("router_z_loss", "mean", str(torch.get_default_dtype()).removeprefix("torch."), ())
            Logged(key, self.stats.z_loss, batch_size=1).replay(self._module, self.metrics)

    def _install(self, start: float, loss_scale: float, last: bool, scale: Tensor) -> None:
        self._gradients.install(scale / loss_scale, last=last)
        if last and self.chunk_size.searches:
            if scale.device.type == "cuda":
                torch.cuda.synchronize(scale.device)
            self._seconds = time.perf_counter() - start


def _loss_of(result: Any) -> Tensor:
    """The loss in what a training_step returned; MisconfigurationException where there is none."""
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise MisconfigurationException(
            f"training_step returned {what}: this strategy needs a scalar loss, or a dict with one under 'loss'; "
            "to skip a batch return a loss of zero"
        )
    return loss


def _loss_value(result: Any) -> Tensor:
    return _loss_of(result).detach()
