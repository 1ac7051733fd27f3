"""Six steps of a small model with a plain optimizer or one whose state is divided over the A ranks.

Everything here runs in the rank pool.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Model, Run, State, tiny_module
from flat_parts import FlatParts
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import lr_scheduler

from lightning_afd.model.place import is_owned
from lightning_afd.strategies import config, divided
from lightning_afd.strategies.deepspeed_zero import installed_version
from lightning_afd.strategies.divided import share_of

STEPS = 6
SAVED = 3
needs_deepspeed = pytest.mark.skipif(installed_version() is None, reason="needs pip install 'lightning-afd[deepspeed]'")
engines = pytest.mark.parametrize("sharding", ["stand-in", pytest.param("deepspeed", marks=needs_deepspeed)])
"""Both, of what divides in equal parts."""


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-2], total_steps=STEPS + 1),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0),
    "sequential": _sequential,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fit of six batches."""

    sharding: str = "torch"
    """"stand-in": the parts of a FlatOptimizer, by torch alone."""
    scheduler: str = ""
    hook: bool = False
    """Whether a hook of the module sets rates between backward and step."""
    poison: bool = False
    """Whether one gradient is infinite in the third step."""
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    """Adagrad makes its state in the constructor."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the Trainer."""
    scaled: bool = False


@dataclass
class Result:
    """What a rank has at the end."""

    weights: State
    state: State
    """Optimizer state of this rank as `name/key`."""
    rates: list[list[Any]]
    """Rates and betas of each group behind each step."""
    names: list[str]
    started: State
    """Optimizer state behind the start."""
    saved: State
    """Optimizer state at the save."""
    trail: list[tuple[float, float | None]]
    """Sum of all weights and gradient norm behind each step."""
    kept: int
    """Numbers of optimizer state in this rank's memory, without those that count steps."""


class Grouped(Model):
    """Two groups, whose order is not that of the parameters."""

    case: Case

    def configure_optimizers(self) -> Any:
        """Matrices decay."""
        named = dict(self.named_parameters())
        decayed = [p for name, p in named.items() if "proj" in name or "qkv" in name]
        others = [p for p in named.values() if all(p is not other for other in decayed)]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.3, "lr": 2e-2}]
        optimizer = self.case.optimizer(groups, lr=1e-2)  # type: ignore[call-arg]
        if not self.case.scheduler:
            return optimizer
        config = {"scheduler": SCHEDULERS[self.case.scheduler](optimizer), "interval": "step", "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """A schedule of the user's own."""
        if self.case.hook:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + self.global_step)

    def on_after_backward(self) -> None:
        """An overflow."""
        if self.case.poison and self.trainer.global_rank == 1 and self.trainer.fit_loop.epoch_loop.batch_idx == 2:
            next(p for p in self.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")


@dataclass
class Watch(pl.Callback):
    """Looks at the optimizer at the start and behind each step; saves behind the third one if told where."""

    path: Path | None = None
    rates: list[list[Any]] = field(default_factory=list)
    started: State = field(default_factory=dict)
    saved: State = field(default_factory=dict)
    trail: list[tuple[float, float | None]] = field(default_factory=list)
    ended: State = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what was loaded."""
        self.started = state_of(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Look at a step."""
        total = sum(float(p.detach().double().sum()) for p in pl_module.parameters() if is_owned(p))
        self.trail.append((total, getattr(trainer.strategy, "grad_norm", None)))
        self.rates.append([(group["lr"], group.get("betas")) for group in trainer.optimizers[0].param_groups])
        if trainer.global_step == SAVED and self.path is not None:
            self.saved = state_of(pl_module, trainer.optimizers[0])
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the end, as long as the ranks can talk."""
        (optimizer,) = trainer.optimizers
        self.ended = state_of(pl_module, optimizer)
        self.names = [type(optimizer).__name__, type(share_of(optimizer)).__name__]


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies of the state that this rank brings to a checkpoint."""
    names, states = {p: name for name, p in module.named_parameters()}, share_of(optimizer).state.items()
    return {f"{names[p]}/{key}": torch.as_tensor(v).clone() for p, values in states for key, v in values.items()}


@contextmanager
def engine(sharding: str) -> Iterator[str]:
    """The option of the strategy, with which the stand-in is used if that is wanted."""
    with pytest.MonkeyPatch.context() as patch:
        if sharding == "stand-in":
            patch.setattr(divided, "ZeroParts", FlatParts)
            patch.setattr(config, "check_installed", lambda: None)
        yield "deepspeed" if sharding == "stand-in" else sharding


def fit(run: Run, cases: Sequence[Case], save: Path | None = None, start: Path | None = None) -> list[Result]:
    """Train on this rank, case by case."""
    return [_fit(run, case, save, start) for case in cases]


def _fit(run: Run, case: Case, save: Path | None, start: Path | None) -> Result:
    module = tiny_module(steps=STEPS, seed=0 if start is None else 1, tied=True, layers=2)
    module.__class__, module.case = Grouped, case  # type: ignore[assignment]
    watch = Watch(save)
    options: dict[str, Any] = {"callbacks": [watch], **case.options}
    with engine(case.sharding) as sharding:
        trainer = run.trainer({"optimizer_sharding": sharding, "on_nonfinite": "skip"}, **options)
        if case.scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
            trainer.strategy._precision_plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        trainer.fit(module, ckpt_path=start)
    held = {name: p.detach().clone() for name, p in module.named_parameters() if is_owned(p)}
    kept = sum(
        v.numel()
        for values in trainer.optimizers[0].state.values()
        for v in values.values()
        if torch.as_tensor(v).dim()
    )
    return Result(held, watch.ended, watch.rates, watch.names, watch.started, watch.saved, watch.trail, kept)


def same(one: State, other: State) -> bool:
    """Whether all tensors are bit-equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one: State, other: State) -> bool:
    """Whether only the rounding of float64 differs."""
    return one.keys() == other.keys() and all(torch.allclose(one[n], other[n], rtol=0, atol=1e-12) for n in one)


def one(ranks: list[list[Result]]) -> list[Result]:
    """The only case of each rank."""
    return [result for (result,) in ranks]


def joined(ranks: list[Result], when: str, *, divided: bool) -> State:
    """State of all A ranks; none of it twice if divided."""
    parts: list[State] = [getattr(rank, when) for rank in ranks[:-1]]
    whole = {name: value for part in parts for name, value in part.items()}
    assert len(whole) == (sum(map(len, parts)) if divided else len(parts[0]))
    return whole
