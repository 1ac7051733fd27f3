"""A Trainer's fit with shared experts on F ranks: clipped by the norm of one device, and resumed bit for bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import join, weights
from fits import Model, Run, State, tiny_module, worst
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pool import RankPool

from lightning_afd import AFDStrategy

SAVED, STEPS, CLIP = 2, 4, 0.05
APART = Run(layout="2A+2F", precision="64-true")


@dataclass
class Result:
    """What one rank has at the end: weights, the norm of each step, the optimizer's moments."""

    weights: State
    norms: list[float]
    moments: list[torch.Tensor]


class Adam(Model):
    """Weight decay acts on every replica of the shared experts alike."""

    def configure_optimizers(self) -> Any:
        """AdamW on all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3, weight_decay=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Nothing is remembered: a gradient of one device would be a copy."""


class Saver(pl.Callback):
    """Saves after `SAVED` steps and collects norms."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.norms = path, list[float]()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Look at a step."""
        self.norms += [norm] if (norm := getattr(trainer.strategy, "grad_norm", None)) is not None else []
        if self.path is not None and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def fit(run: Run, seed: int, path: Path | None, start: Path | None = None) -> Result:
    """One epoch of 4 batches, from a checkpoint if there is one."""
    module = tiny_module(steps=STEPS, shared_expert=True, seed=seed)
    module.__class__ = Adam
    saver = Saver(path)
    strategy = {"shared_experts": "ffn"} if run.layout != "ref" else {}
    trainer = run.trainer(strategy, callbacks=[saver], gradient_clip_val=CLIP)
    trainer.fit(module, ckpt_path=start)
    moments = [state[key] for state in trainer.optimizers[0].state.values() for key in ("exp_avg", "exp_avg_sq")]
    return Result(weights(module), saver.norms, moments)


def through_and_resumed(run: Run, path: Path) -> tuple[Result, Result]:
    """An uninterrupted run, and one that starts from its checkpoint with other weights."""
    return fit(run, 0, path), fit(run, 1, None, path)


@pytest.fixture(scope="module")
def ranks(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Result, Result]]:
    """Both runs of all ranks."""
    return pool.run(through_and_resumed, 4, APART, tmp_path_factory.mktemp("shared") / "middle.ckpt")


def test_fit_is_that_of_one_device(ranks: list[tuple[Result, Result]]) -> None:
    alone = fit(Run(layout="ref", precision="64-true"), 0, None)
    through = [first for first, _ in ranks]
    assert worst(join([one.weights for one in through]), alone.weights)[0] < 1e-9
    assert all(one.norms == through[0].norms and len(one.norms) == STEPS for one in through)
    assert max(through[0].norms) > CLIP


def test_every_ffn_rank_holds_the_same_shared_experts(ranks: list[tuple[Result, Result]]) -> None:
    weights = [first.weights for first, _ in ranks]
    shared = [name for name in weights[2] if ".shared." in name]
    assert len(shared) == 6 and not any(name in weights[rank] for name in shared for rank in (0, 1))
    assert all(torch.equal(weights[2][name], weights[3][name]) for name in shared)


def test_resume_is_bit_exact(ranks: list[tuple[Result, Result]]) -> None:
    for through, resumed in ranks:
        assert resumed.norms == through.norms[SAVED:]
        assert all(torch.equal(resumed.weights[name], value) for name, value in through.weights.items())
        assert all(torch.equal(a, b) for a, b in zip(resumed.moments, through.moments, strict=True))


def test_unknown_place_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="shared_experts='both': choose 'attention' or 'ffn'"):
        AFDStrategy(shared_experts="both")
