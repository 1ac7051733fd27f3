"""Whole runs with head="ffn" against one device: weights, clip norm, metrics, outputs, resume, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from cases import LM, batch, fit_apart, weights
from pool import RankPool
from torch import Tensor

from lightning_afd.placement import Layout

LAYOUTS = [(2, 2, 1), (3, 1, 1), (1, 3, 1), (1, 1, 2)]
OPTIONS: dict[str, Any] = {"gradient_clip_val": 0.2}


def steps_of(groups: int) -> list[dict[str, Tensor]]:
    """Three batches, of which one has masked labels."""
    steps = [batch(6, 8, seed) for seed in range(3)]
    steps[1]["labels"][:3, 4:] = -100
    return steps


def fit(attention: int, ffn: int, groups: int) -> tuple[dict[str, Tensor], dict[str, float], float | None]:
    """Weights, metrics and the last norm of one rank."""
    module = LM(steps_of(groups), aux=0.05, opt="adamw").double()
    trainer = fit_apart(module, attention, ffn, p=groups, R=2, head="ffn", **OPTIONS)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module), metrics, trainer.strategy.grad_norm


@pytest.mark.parametrize(("attention", "ffn", "groups"), LAYOUTS)
def test_fit(pool: RankPool, attention: int, ffn: int, groups: int) -> None:
    results = pool.run(fit, Layout(attention=attention, ffn=ffn, groups=groups).world, attention, ffn, groups)
    print(results[0][1], results[0][2], [sorted(r[0]) for r in results][-1])
