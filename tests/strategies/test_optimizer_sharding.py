"""Optimizer state divided over the A ranks: the numbers of the plain optimizer, half of its bytes, any checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fits import Model, Run, State, tiny_module
from lightning.pytorch.plugins import MixedPrecision
from pool import RankPool
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_afd.model.place import is_owned
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies.divided import divide_state, share_of
from lightning_afd.strategies.refusals import refuse_optimizer

STEPS = 6
SAVED = 3
RUN = Run(layout="2A+1F", precision="64-true")


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

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what was loaded."""
        self.started = state_of(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Look at a step."""
        self.rates.append([(group["lr"], group.get("betas")) for group in trainer.optimizers[0].param_groups])
        if trainer.global_step == SAVED and self.path is not None:
            self.saved = state_of(pl_module, trainer.optimizers[0])
            trainer.save_checkpoint(self.path)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies of the state that this rank holds."""
    names, states = {p: name for name, p in module.named_parameters()}, optimizer.state.items()
    return {f"{names[p]}/{key}": value.clone() for p, values in states for key, value in values.items()}


def fit(run: Run, cases: Sequence[Case], save: Path | None = None, start: Path | None = None) -> list[Result]:
    """Train on this rank, case by case."""
    results = []
    for case in cases:
        module = tiny_module(steps=STEPS, seed=0 if start is None else 1, tied=True, layers=2)
        module.__class__, module.case = Grouped, case  # type: ignore[assignment]
        watch = Watch(save)
        options: dict[str, Any] = {"callbacks": [watch], **case.options}
        sharding = {"optimizer_sharding": case.sharding, "on_nonfinite": "skip"}
        trainer = run.trainer(sharding, **options)
        if case.scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
            trainer.strategy._precision_plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        trainer.fit(module, ckpt_path=start)
        optimizer = trainer.optimizers[0]
        held = {name: p.detach().clone() for name, p in module.named_parameters() if is_owned(p)}
        names = [type(optimizer).__name__, type(share_of(optimizer)).__name__]
        results.append(Result(held, state_of(module, optimizer), watch.rates, names, watch.started, watch.saved))
    return results


def same(one: State, other: State) -> bool:
    """Whether all tensors are bit-equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"scheduler": "lambda", "options": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 4}},
    "values": {"scheduler": "one cycle", "options": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}},
    "a step left out": {"scheduler": "plateau", "poison": True, "options": {"gradient_clip_val": 0.1}},
    "a hook of the user": {"scheduler": "sequential", "hook": True, "optimizer": torch.optim.Adagrad},
}


def test_numbers_are_those_of_the_plain_optimizer(pool: RankPool) -> None:
    cases = [Case(sharding=sharding, **options) for options in CASES.values() for sharding in ("none", "torch")]
    ranks = pool.run(fit, RUN.world, RUN, cases, timeout=120)
    for number, name in enumerate(CASES):
        for rank in ranks:
            plain, divided = rank[2 * number : 2 * number + 2]
            assert same(plain.weights, divided.weights), name
            assert plain.rates == divided.rates and plain.names == divided.names, name
        check_shares([rank[2 * number] for rank in ranks], [rank[2 * number + 1] for rank in ranks])


def check_shares(plain: list[Result], divided: list[Result]) -> None:
    """Both A ranks together hold the state of one, half of it each as far as whole parameters allow; F is as it was."""
    assert same(plain[2].state, divided[2].state)
    first, second = divided[0].state, divided[1].state
    assert first.keys().isdisjoint(second) and same(plain[0].state, {**first, **second})
    largest = max(value.numel() for value in plain[0].weights.values())
    tensors = sum(value.numel() for value in plain[0].weights.values())
    kinds = len({key.split("/")[1] for key, value in plain[0].state.items() if value.dim()})
    for part in (first, second):
        numbers = sum(value.numel() for value in part.values() if value.dim())
        assert abs(numbers - kinds * tensors / 2) <= kinds * largest / 2


def _broken(name: str, case: Case) -> list[Result]:
    """A fit with a method of torch's own optimizer, or without it."""
    from lightning_afd.strategies.sharded_optimizer import ShardedOptimizer, ZeroRedundancyOptimizer

    method = ZeroRedundancyOptimizer.step if name == "step" else lambda self: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedOptimizer, name, method)
        return fit(RUN, [case])


def test_without_the_exchange_replicas_go_apart(pool: RankPool) -> None:
    first, second, _ = (rank.weights for rank in one(pool.run(_broken, RUN.world, "_sync_params", Case())))
    assert first.keys() == second.keys() and not any(torch.equal(first[name], second[name]) for name in first)


def test_torchs_own_step_forgets_rates_that_a_hook_sets(pool: RankPool) -> None:
    first, _, plain = one(pool.run(_broken, RUN.world, "step", Case(hook=True)))
    assert first.rates != plain.rates


def test_under_a_loss_scaler(pool: RankPool) -> None:
    run = Run(layout="2A+1F")
    cases = [
        Case(sharding=how, poison=True, scaled=True, options={"gradient_clip_val": 0.1}) for how in ("none", "torch")
    ]
    for plain, divided in pool.run(fit, run.world, run, cases):
        assert same(plain.weights, divided.weights)


def test_checkpoints_go_from_one_sharding_and_layout_to_another(pool: RankPool, tmp_path: Path) -> None:
    paths = {how: tmp_path / f"{how}.ckpt" for how in ("none", "torch")}
    whole = {how: one(pool.run(fit, 3, RUN, [Case(sharding=how, scheduler="lambda")], paths[how])) for how in paths}
    assert whole["torch"][0].rates == whole["none"][0].rates
    other = Run(layout="3A+1F", precision="64-true")
    for run, before, after in [(RUN, "torch", "none"), (RUN, "none", "torch"), (other, "torch", "torch")]:
        case = Case(sharding=after, scheduler="lambda")
        ranks = one(pool.run(fit, run.world, run, [case], None, paths[before]))
        assert all(rank.rates == whole["none"][0].rates[SAVED:] for rank in ranks)
        assert run is not RUN or all(close(a.weights, b.weights) for a, b in zip(ranks, whole["none"], strict=True))
        assert same(joined(ranks, "started", divided=after == "torch"), whole["none"][0].saved)
        assert same(joined(whole["torch"], "saved", divided=True), whole["none"][0].saved)


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


def _step_mixed(divide: bool) -> tuple[list[Tensor], int]:
    """Three steps of parameters of several dtypes, one of them frozen and one without gradients, on two ranks."""
    if divide:
        dist.init_process_group("gloo")
    draw = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, 3, generator=draw)) for n in range(1, 6)]
    parameters[1].data = parameters[1].data.to(torch.bfloat16)
    parameters[2].requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    if divide:
        (optimizer,) = divide_state([optimizer], [], SimpleNamespace(replicas=dist.group.WORLD))  # type: ignore[arg-type]
    for _ in range(3):
        for parameter in parameters[:2] + parameters[3:-1]:
            parameter.grad = parameter.detach() * 0.1 + 1
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters], len(optimizer.state)


def test_parameters_of_several_dtypes(pool: RankPool) -> None:
    expected, count = _step_mixed(divide=False)
    ranks = pool.run(_step_mixed, 2, True)
    assert sum(own for _, own in ranks) == count == 3
    for parameters, _ in ranks:
        assert all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(parameters, expected, strict=True))


class Lookahead:
    """An optimizer around another one, as users write them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_wrapped_optimizers_are_refused() -> None:
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters())
    refuse_optimizer(inner, "afd", divided=True)
    refuse_optimizer(Lookahead(inner), "afd", divided=False)
    with pytest.raises(MisconfigurationException, match="state of Lookahead, because it wraps SGD"):
        refuse_optimizer(Lookahead(inner), "afd", divided=True)
