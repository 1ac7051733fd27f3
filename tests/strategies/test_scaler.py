"""A loss scaler on every rank: the numbers and the verdicts of the one scaler of a plain loop in float16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from cases import LM, QUIET, batch, join, largest_difference, recording, weights
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from pool import RankPool
from torch import Tensor

from lightning_afd import AFDStrategy
from lightning_afd.strategies import afd


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of six batches (four rows each)."""

    attention: int = 1
    """A ranks per group; 0: Lightning's own strategy on one device."""
    ffn: int = 2
    groups: int = 1
    poison: str = ""
    """Part of the name of a parameter whose gradient overflows in the third step."""
    poisoned_rank: int | None = None
    """The rank whose gradient overflows; None: each that holds it."""
    init_scale: float = 2.0**12
    ce: float = 1.0
    """Factor of the loss."""
    trainer: tuple[tuple[str, Any], ...] = ()
    fused: bool = False
    """Whether the optimizer unscales gradients and leaves steps out by itself."""
    broken: str = ""
    """What is taken away, for negative controls: "seed" or "verdict"."""

    @property
    def world(self) -> int:
        return max(1, self.groups * (self.attention + self.ffn))


@dataclass
class Result:
    """What one rank has at the end."""

    weights: dict[str, Tensor]
    scales: list[float]
    """Behind each batch."""
    gradients: dict[str, Tensor]
    """What the optimizer got in the first step that was really made."""
    grad_norm: float | None
    stepped: int
    """Optimizer steps that were really made."""


class Scales(L.Callback):
    """The scale behind each batch; saves behind the third one if told where."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.values.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]
        if len(self.values) == 3 and self.path is not None:
            trainer.save_checkpoint(self.path)


class Scaled(LM):
    """Keeps gradients; lets one gradient overflow behind a backward, before it is unscaled."""

    def watch(self, case: Case) -> Scaled:
        """Start to keep."""
        self.case, self.gradients, self.stepped = case, {}, 0
        return self

    def on_after_backward(self) -> None:
        here = self.case.poisoned_rank in (None, self.trainer.global_rank)
        if self.case.poison and here and self.trainer.fit_loop.epoch_loop.batch_idx == 2:
            for name, p in self.named_parameters():
                if self.case.poison in name and p.grad is not None:
                    p.grad.view(-1)[0] = float("inf")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=self.case.fused)
        optimizer.register_step_pre_hook(self._keep)
        return optimizer

    def _keep(self, *args: Any) -> None:
        self.stepped += 1
        if self.stepped == 1:
            self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


def scaled_module(case: Case) -> Scaled:
    module = LM([batch(4, 8, seed) for seed in range(6)], ce=case.ce, layers=2)
    module.__class__ = Scaled
    return module.watch(case)  # type: ignore[attr-defined, no-any-return]


def scaled_trainer(case: Case, save: Path | None) -> L.Trainer:
    scaler = torch.amp.GradScaler("cpu", init_scale=case.init_scale, growth_interval=3)
    plugins: list[Any] = [MixedPrecision("16-mixed", device="cpu", scaler=scaler)]
    options = {**QUIET, "devices": case.world, "callbacks": [Scales(save)], **dict(case.trainer)}
    if case.attention:
        own = {"attention": case.attention, "ffn": case.ffn, "groups": case.groups, "micro_batches": 2}
        options["strategy"] = AFDStrategy(**own)
        plugins.append(LightningEnvironment())
    return L.Trainer(plugins=plugins, **options)


def fit(case: Case, *, save: Path | None = None, resume: Path | None = None) -> Result:
    """Train on this rank."""
    module, trainer = scaled_module(case), scaled_trainer(case, save)
    broken = {"seed": "loss_scale", "verdict": "share_found_inf"}.get(case.broken)
    with pytest.MonkeyPatch.context() as patch:
        if broken is not None:
            patch.setattr(afd, broken, lambda *args: 1.0 if broken == "loss_scale" else lambda: None)
        trainer.fit(module, ckpt_path=resume, weights_only=False)
    norm = getattr(trainer.strategy, "grad_norm", None)
    return Result(weights(module), trainer.callbacks[0].values, module.gradients, norm, module.stepped)


def plain_loop(case: Case, replicas: int, parts: int) -> Result:
    """The same without Lightning, over the micro-batches of all replicas one after another."""
    module, scales = scaled_module(case), []
    optimizer, scaler = module.configure_optimizers(), torch.amp.GradScaler("cpu", init_scale=case.init_scale)
    for item in module.steps:
        optimizer.zero_grad()
        pieces = [item["input_ids"][a::replicas].tensor_split(parts) for a in range(replicas)]
        for ids in (piece for row in pieces for piece in row):
            with recording(module), torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = module.training_step({"input_ids": ids, "labels": ids}, 0) / (replicas * parts)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return Result(weights(module), scales, module.gradients, None, module.stepped)


def compare(pool: RankPool, case: Case, tolerance: float = 1e-2) -> tuple[list[Result], Result]:
    """Run on a layout and on one device; scales and steps are equal, numbers as far as float16 goes."""
    options = {key: getattr(case, key) for key in ("poison", "init_scale", "ce", "trainer", "fused")}
    reference = pool.run(fit, 1, Case(attention=0, ffn=0, **options))[0]
    ranks = pool.run(fit, case.world, case)
    assert_equal(ranks, reference, tolerance)
    return ranks, reference


def assert_equal(ranks: list[Result], reference: Result, tolerance: float = 1e-2) -> None:
    """Scales and steps on every rank, gradients and weights of all ranks together."""
    for rank in ranks:
        assert rank.scales == reference.scales
        assert rank.stepped == reference.stepped
    assert largest_difference(join([rank.gradients for rank in ranks]), reference.gradients) < tolerance
    assert largest_difference(join([rank.weights for rank in ranks]), reference.weights) < tolerance


OVERFLOWS = {
    "one F rank": Case(poison="layers.0.mlp.experts.down_proj", poisoned_rank=2),
    "one A rank": Case(poison="layers.0.self_attn.q_proj", poisoned_rank=0),
    "an F rank of group 1": Case(poison="layers.1.mlp.experts.down_proj", ffn=1, groups=2, poisoned_rank=3),
    "an A rank of group 1": Case(poison="layers.1.self_attn.q_proj", ffn=1, groups=2, poisoned_rank=1),
}


@pytest.mark.parametrize("where", OVERFLOWS)
def test_one_overflow_is_everybodys(pool: RankPool, where: str) -> None:
    _, reference = compare(pool, OVERFLOWS[where])
    assert reference.scales == [4096.0, 4096.0, 2048.0, 2048.0, 2048.0, 4096.0]
    assert reference.stepped == 5


def test_optimizers_that_unscale_by_themselves_hear_the_verdict_too(pool: RankPool) -> None:
    _, reference = compare(pool, replace(OVERFLOWS["one F rank"], fused=True))
    assert reference.scales == [4096.0, 4096.0, 2048.0, 2048.0, 2048.0, 4096.0]


def test_without_the_exchange_ranks_go_apart(pool: RankPool) -> None:
    ranks = pool.run(fit, 3, Case(poison="layers.0.mlp.experts.down_proj", poisoned_rank=2, broken="verdict"))
    assert [rank.stepped for rank in ranks] == [6, 6, 5]
    assert ranks[0].scales != ranks[2].scales


UNDERFLOW = Case(attention=2, ffn=2, ce=1e-5, init_scale=2.0**22)
"""Without its scale this loss has gradients below the smallest number of float16."""


def test_the_backward_of_the_pipeline_starts_from_the_scaled_loss(pool: RankPool) -> None:
    compare(pool, UNDERFLOW, 2e-2)


def test_unscaled_gradients_would_vanish_on_the_wire(pool: RankPool) -> None:
    ranks = pool.run(fit, 4, replace(UNDERFLOW, broken="seed"))
    experts = [gradient for name, gradient in ranks[2].gradients.items() if ".experts." in name]
    assert not any(gradient.any() for gradient in experts)


def test_the_scale_falls_until_nothing_overflows(pool: RankPool) -> None:
    """Overflow by arithmetic, not by a hook: the first steps are left out everywhere."""
    case = Case(attention=2, ffn=2, init_scale=2.0**22)
    reference = plain_loop(case, replicas=2, parts=2)
    assert 0 < reference.stepped < 6
    assert_equal(pool.run(fit, case.world, case), reference)


@pytest.mark.parametrize("poison", ["", "layers.0.mlp.experts.down_proj"])
def test_clipping_by_norm_and_accumulation(pool: RankPool, poison: str) -> None:
    """The norm is that of unscaled gradients, the scale constant in a window; an infinite norm is the scaler's case."""
    trainer = (("accumulate_grad_batches", 2), ("gradient_clip_val", 0.05))
    ranks, reference = compare(pool, Case(poison=poison, poisoned_rank=1 if poison else None, trainer=trainer))
    assert reference.stepped == (2 if poison else 3)
    assert len({rank.grad_norm for rank in ranks}) == 1
    assert 0.05 < ranks[0].grad_norm < 10  # type: ignore[operator]


def save_and_resume(case: Case, folder: Path) -> tuple[Result, Result]:
    """The whole run, saved behind the step that overflows; then the rest once more."""
    path = folder / "third"
    return fit(case, save=path), fit(case, resume=path)


def test_scale_is_in_the_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    case = replace(OVERFLOWS["one F rank"], init_scale=2.0**13)
    for whole, resumed in pool.run(save_and_resume, 3, case, tmp_path):
        assert whole.scales == [8192.0, 8192.0, 4096.0, 4096.0, 4096.0, 8192.0]
        assert resumed.scales == whole.scales[3:]
        assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
