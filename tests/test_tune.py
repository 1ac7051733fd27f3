"""The search for S_p: small regret on noisy curves, no harm where chunks gain nothing, the same answers every time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
import torch

from lightning_afd.errors import PlanError
from lightning_afd.tune import KIB, MIB, Tuned, Tuner, Tuning, in_bytes

Curve = Callable[[int | None], float]
NOISE = 0.01
RANGE = math.log2(128 * KIB), math.log2(64 * MIB)


def curve(seed: int, without: float = 2.0) -> tuple[Curve, float]:
    """Seconds of a step, a / S + b S + c with its minimum anywhere in the range, and the minimum."""
    draw = random.Random(seed)
    best, depth = 2 ** draw.uniform(18, 25), draw.uniform(0.1, 1)
    return lambda size: without if size is None else 1 + depth * (best / size + size / best) / 2, 1 + depth


def sample(seconds: float, draw: random.Random) -> list[float]:
    """Ten noisy steps."""
    return [seconds * draw.gauss(1, NOISE) for _ in range(10)]


def search(seconds: Curve, tuning: Tuning) -> tuple[Tuned, list[int | None]]:
    """A whole search, and what it asked for."""
    tuner, draw, asked = Tuner(tuning), random.Random(tuning.seed), []
    while tuner.tuned is None:
        asked.append(tuner.ask())
        tuner.tell(sample(seconds(asked[-1]), draw))
    return tuner.tuned, asked


def fastest_of(sizes: list[int], seconds: Curve, draw: random.Random) -> int:
    """What somebody adopts who measures these sizes."""
    return min(sizes, key=lambda size: median(sample(seconds(size), draw)))


def grid() -> list[int]:
    """Eight sizes at equal distances in log2 S_p."""
    low, high = RANGE
    return [round(2 ** (low + (high - low) * step / 7)) for step in range(8)]


def test_regret_is_small_and_half_of_that_of_random_sizes() -> None:
    """The search tries five sizes (three samples are repetitions and "no chunks"), its controls eight."""
    regrets: dict[str, list[float]] = {"search": [], "random": [], "grid": []}
    for seed in range(12):
        (seconds, least), draw = curve(seed), random.Random(100 + seed)
        drawn = [round(2 ** draw.uniform(*RANGE)) for _ in range(8)]
        found = {
            "search": search(seconds, Tuning(seed=seed))[0].fastest,
            "random": fastest_of(drawn, seconds, draw),
            "grid": fastest_of(grid(), seconds, draw),
        }
        for name, size in found.items():
            regrets[name].append(seconds(size) / least - 1)
    assert median(regrets["search"]) < 0.01
    assert sum(regrets["search"]) < sum(regrets["random"]) / 2
    assert sum(regrets["search"]) < 2 * sum(regrets["grid"])


def test_samples_are_no_chunks_then_sizes_then_the_best_again_then_no_chunks() -> None:
    seconds, _ = curve(3)
    tuned, asked = search(seconds, Tuning())
    assert len(asked) == 8 and asked[0] is asked[-1] is None
    sizes = [size for size in asked[1:-2] if size is not None]
    assert len(set(sizes)) == 5 and all(128 * KIB <= size <= 64 * MIB for size in sizes)
    assert asked[-2] == tuned.fastest == min(sizes, key=seconds)
    assert tuned.chunk_bytes == tuned.fastest and 0 < tuned.noise < 0.1 * tuned.seconds
    assert tuned.seconds == pytest.approx(seconds(tuned.fastest), rel=NOISE)


def test_the_same_times_give_the_same_questions() -> None:
    seconds, _ = curve(1)
    assert search(seconds, Tuning()) == search(seconds, Tuning())


def test_random_numbers_of_the_job_are_left_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    search(lambda size: 1.0, Tuning(samples=6, steps=2))
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(("without", "adopted"), [(0.9, False), (1.0, False), (1.2, True)])
def test_chunks_are_adopted_only_where_they_gain_more_than_noise(without: float, adopted: bool) -> None:
    tuned, _ = search(lambda size: without if size is None else 1.0, Tuning())
    assert (tuned.chunk_bytes is not None) == adopted


def test_a_machine_that_gets_faster_meanwhile_is_noise() -> None:
    """Each sample takes 3 % less than the one before: the last sample without chunks is the fastest of all."""
    tuner, seconds = Tuner(Tuning()), 1.0
    while tuner.tuned is None:
        tuner.ask()
        tuner.tell([seconds] * 10)
        seconds *= 0.97
    assert tuner.tuned.chunk_bytes is None and tuner.tuned.noise > 0.02


def test_what_is_said() -> None:
    tuned = Tuned(chunk_bytes=MIB, fastest=MIB, seconds=0.82, without=0.85, noise=0.01)
    assert str(tuned) == "S_p = 1 MiB: step 0.82 s, without chunks 0.85 s +- 0.01 s"
    refused = Tuned(chunk_bytes=None, fastest=1536 * KIB, seconds=0.85, without=0.849, noise=0.01)
    assert str(refused) == "no chunks: step 0.849 s, with the best S_p (1.5 MiB) 0.85 s +- 0.01 s"
    assert [in_bytes(size) for size in (7, 2048, 3 * MIB)] == ["7 B", "2 KiB", "3 MiB"]


@pytest.mark.parametrize("wrong", [{"samples": 4}, {"steps": 1}, {"least": 0}, {"least": 2, "most": 1}])
def test_impossible_searches_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="tuning S_p needs 5 samples, 2 steps"):
        Tuning(**wrong)
