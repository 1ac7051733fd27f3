"""Case D10: the expert bias moves once per optimizer step, by exact counts of all ranks, in float32."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import LM, batch, fit_alone, join, largest_difference, route_to, weights
from fits import Run
from pool import RankPool, RemoteError
from tiny import tiny_hf
from torch import Tensor, nn

from lightning_afd.callbacks import ExpertLoad
from lightning_afd.strategies.expert_balance import ExpertBalance

RATE = 1e-3
BIAS = "gate.e_score_correction_bias"


class Deepseek(LM):
    """DeepSeek-V3 with one expert per token; every bias starts at `start`."""

    def __init__(self, steps: list[Any], start: float, *, forced: bool, **options: Any) -> None:
        super().__init__(steps, **options)
        self.model = tiny_hf("deepseek_v3", num_hidden_layers=3, num_experts_per_tok=1)
        self.poisoned_step = -1
        for name, buffer in self.model.named_buffers():
            if name.endswith(BIAS):
                buffer.fill_(start)
        if forced:
            route_to(self.model, (0,))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """One gradient is not finite on one rank in one step."""
        if self.trainer.global_step == self.poisoned_step and self.trainer.global_rank == 0:
            next(p for p in self.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")

    def biases(self) -> dict[str, Tensor]:
        """All that this rank holds."""
        return {name: buffer.clone() for name, buffer in self.named_buffers() if name.endswith(BIAS)}


class SaveInTheMiddle(pl.Callback):
    """Saves behind the fifth optimizer step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 5 and not self.path.exists():
            trainer.save_checkpoint(self.path)


@dataclass(frozen=True, kw_only=True)
class D10:
    """Batches of 4 rows per replica, two for each optimizer step; every token goes to expert 0."""

    run: Run
    start: float = 1.0
    """All biases before the run."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the strategy."""
    save: Path | None = None
    resume: Path | None = None
    poisoned_step: int = -1
    batches: int = 20


def fit(case: D10) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The biases at the end, and the counts of the last step."""
    loads = ExpertLoad(every_n_steps=1)
    module = Deepseek([batch(4 * case.run.sizes[0], 8, seed) for seed in range(case.batches)], case.start, forced=True)
    module.poisoned_step = case.poisoned_step
    callbacks = [loads] if case.save is None else [loads, SaveInTheMiddle(case.save)]
    options = {"expert_bias_rate": RATE, **dict(case.options)}
    case.run.trainer(options, accumulate_grad_batches=2, callbacks=callbacks).fit(module, ckpt_path=case.resume)
    return module.biases(), [load.tolist() for load in loads.loads]


def check(biases: dict[str, Tensor], first: float, others: float) -> None:
    assert len(biases) == 2
    for value in biases.values():
        assert value.dtype == torch.float32
        assert value.tolist() == pytest.approx([first, others, others, others], abs=1e-6)


RUNS = [Run(layout=layout, micro_batches=4, precision="bf16-true") for layout in ("1A+1F", "2A+2F")]
RUNS.append(Run(layout="1A+1F", groups=2, micro_batches=4, precision="bf16-true"))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_d10_one_exact_update_per_step(pool: RankPool, run: Run, tmp_path: Path) -> None:
    steps = 10 if run.layout == "2A+2F" else 3
    case = D10(run=run, options=(("recompute", "full"),), save=tmp_path / "middle.ckpt", batches=2 * steps)
    again = D10(run=run, start=5.0, resume=case.save)  # without recompute
    for one in (case, again) if run.layout == "2A+2F" else (case,):
        for biases, loads in pool.run(fit, run.world, one):
            check(biases, 1.0 - steps * RATE, 1.0 + steps * RATE)
            tokens = 2 * 4 * 8 * run.sizes[0]  # of 2 batches of 4 rows of 8 per replica
            assert loads == [[tokens, 0, 0, 0]] * 2


def test_skipped_steps_move_nothing(pool: RankPool) -> None:
    case = D10(run=RUNS[1], options=(("on_nonfinite", "skip"),), poisoned_step=1, batches=6)
    for biases, _ in pool.run(fit, case.run.world, case):
        check(biases, 0.998, 1.002)


def per_micro_batch(run: Run) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The mistakes that the case is about: one update per batch, of a bias in bfloat16."""
    end_window, keep = ExpertBalance.end_window, ExpertBalance.kept_in_float32

    def move(balance: ExpertBalance) -> None:
        end_window(balance)
        for bias in balance._biases:
            bias.move(balance.loads()[bias.layer], balance._rate)

    ExpertBalance.end_window, ExpertBalance.kept_in_float32 = move, lambda self: nullcontext()  # type: ignore[method-assign,assignment]
    try:
        return fit(D10(run=run, batches=4))
    finally:
        ExpertBalance.end_window, ExpertBalance.kept_in_float32 = end_window, keep  # type: ignore[method-assign]


def test_mistakes_are_caught(pool: RankPool) -> None:
    run = RUNS[0]
    for biases, _ in pool.run(per_micro_batch, run.world, run):
        with pytest.raises(AssertionError):
            check(biases, 0.998, 1.002)


LARGE = 0.01


class Balancing(pl.Callback):
    """The same by hand on one device: hooks count, the bias moves behind each optimizer step."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.step = 0
        self.routers = [m for m in module.modules() if type(m).__name__ == "DeepseekV3TopkRouter"]
        self.counts = [torch.zeros(4, dtype=torch.int64) for _ in self.routers]
        for router, counts in zip(self.routers, self.counts, strict=True):
            router.e_score_correction_bias = router.e_score_correction_bias.float()
            router.register_forward_hook(partial(self.count, counts))

    @staticmethod
    def count(counts: Tensor, module: nn.Module, args: Any, out: Any) -> None:
        counts += out[2].flatten().bincount(minlength=4)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        for router, counts in zip(self.routers, self.counts, strict=True):
            router.e_score_correction_bias += LARGE * (counts.double().mean() - counts).sign()
            counts.zero_()


def balanced_module(rows: int) -> Deepseek:
    return Deepseek([batch(rows, 8, seed) for seed in range(6)], 0.0, forced=False).double()


def balanced(run: Run, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = balanced_module(rows)
    run.trainer({"expert_bias_rate": LARGE, "recompute": "full"}, accumulate_grad_batches=2).fit(module)
    return weights(module), module.biases()


@pytest.mark.parametrize("run", [Run(precision="64-true"), Run(layout="1A+1F", groups=2, precision="64-true")], ids=str)
def test_training_equals_balancing_by_hand(pool: RankPool, run: Run) -> None:
    reference, unbalanced = balanced_module(4), balanced_module(4)
    fit_alone(reference, accumulate_grad_batches=2, callbacks=[Balancing()])
    fit_alone(unbalanced, accumulate_grad_batches=2)
    assert largest_difference(weights(unbalanced), weights(reference)) > 1e-4
    ranks = pool.run(balanced, run.world, run, 4)
    assert largest_difference(join([mine for mine, _ in ranks]), weights(reference)) < 1e-7
    for _, biases in ranks:
        assert largest_difference(biases, reference.biases()) < 1e-6


def fit_qwen(run: Run) -> None:
    run.trainer({"expert_bias_rate": RATE}).fit(LM([batch(4, 8)]))


def test_models_without_a_bias_are_refused_on_every_rank(pool: RankPool) -> None:
    run = RUNS[0]
    for error in pool.try_run(fit_qwen, run.world, run):
        assert isinstance(error, RemoteError) and error.type_name == "MisconfigurationException"
        assert "have no bias to move" in error.message
