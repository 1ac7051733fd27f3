"""Algorithm 1 on surfaces that are known: it finds their valley, in spite of noise, and never gets worse."""

from __future__ import annotations

import random

import pytest

from lightning_afd.allocate.search import Point, Search, local_search, neighbours
from lightning_afd.errors import PlanError


class Surface:
    """Step times of M + N ranks: the busier of both sides, times noise that only adds."""

    def __init__(self, attention: float, ffn: float, noise: float, seed: int) -> None:
        self.attention, self.ffn, self.noise = attention, ffn, noise
        self.dice = random.Random(seed)
        self.calls = 0

    def true(self, point: Point) -> float:
        return max(self.attention / point[0], self.ffn / point[1])

    def __call__(self, point: Point) -> float:
        self.calls += 1
        return self.true(point) * (1 + self.noise * self.dice.random())


def in_world(point: Point) -> bool:
    return sum(point) <= 16


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_finds_the_valley(noise: float, seed: int) -> None:
    surface = Surface(attention=30 + seed, ffn=18, noise=noise, seed=seed)
    best = min(surface.true((m, 16 - m)) for m in range(1, 16))
    found = local_search((4, 12), in_world, surface, Search(trials=64, repetitions=5))
    assert surface.true(found.point) <= best * 1.08
    assert all(in_world(point) for point in found.measured)


def test_adopts_only_what_was_measured_and_never_more_than_the_start() -> None:
    surface = Surface(attention=10, ffn=10, noise=0.5, seed=1)
    found = local_search((8, 8), in_world, surface, Search(trials=9, repetitions=2))
    assert found.measured[found.point] == found.seconds <= found.measured[8, 8]
    assert len(found.measured) <= 9
    assert surface.calls == 2 * len(found.measured)


def test_differences_within_the_tolerance_are_noise() -> None:
    """One repetition and noise of 1 %: with a tolerance of 2 % a flat surface is not walked over."""
    flat = Surface(attention=0, ffn=0, noise=0, seed=0)
    dice = random.Random(3)
    found = local_search((4, 4), in_world, lambda _: 1 + 0.01 * dice.random(), Search(tolerance=0.02, repetitions=1))
    assert found.point == (4, 4)
    dice = random.Random(3)
    walked = local_search((4, 4), in_world, lambda _: 1 + 0.01 * dice.random(), Search(tolerance=0.0, repetitions=1))
    assert walked.point != (4, 4)
    assert flat.calls == 0


def test_neighbours_are_near_and_positive() -> None:
    found = list(neighbours((1, 5), 1))
    assert found == [(1, 4), (1, 6), (2, 5), (2, 4), (2, 6)]


def test_search_without_trials_is_refused() -> None:
    with pytest.raises(PlanError, match="trials=0: a search needs at least 1"):
        Search(trials=0)
