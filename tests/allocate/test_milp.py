"""The linear program finds what trying all divisions finds, ties included, with each solver."""

from __future__ import annotations

import random
from itertools import product

import pytest

from lightning_afd.allocate.division import Division, Needs, Size, Split, attention_sizes, ffn_sizes
from lightning_afd.allocate.milp import TOLERANCE, solve, solvers
from lightning_afd.errors import PlanError


def brute_force(division: Division) -> Split:
    """Try everything."""
    nics = [(a, f) for a, f in product(range(1, division.nics), repeat=2) if a + f <= division.nics]
    found = [
        (division.seconds(a, f, n), a, f, n)
        for a, f, n in product(division.attention, division.ffn, nics)
        if division.allows(a, f, n)
    ]
    if not found:
        raise PlanError("none")
    best = min(seconds for seconds, *_ in found)
    ties = [entry for entry in found if entry[0] <= best * (1 + TOLERANCE)]

    def key(entry: tuple[float, Size, Size, tuple[int, int]]) -> tuple[float, ...]:
        _, a, f, n = entry
        return a.ranks + f.ranks, round(sum(division.busy(a, f, n)) / best, 6), a.ranks, *n

    seconds, a, f, n = min(ties, key=key)
    return Split(attention=a.ranks, ffn=f.ranks, attention_nics=n[0], ffn_nics=n[1], seconds=seconds)


def random_division(seed: int) -> Division:
    dice = random.Random(seed)
    ranks, nics = dice.randint(2, 14), dice.randint(2, 8)
    needs = Needs(**{name: dice.uniform(0.5, 20) for name in ("attention", "ffn", "attention_nic", "ffn_nic")})
    sizes = ffn_sizes(dice.choice([8, 12, 60, 64]), ranks - 1)
    per_rank = dice.choice([0.5, 2.0, 50.0])
    return Division(
        needs=needs,
        attention=attention_sizes(dice.choice([16, 24, 31]), ranks - 1),
        ffn=tuple(Size(ranks=s.ranks, capacity=s.capacity, most_attention=int(s.ranks * per_rank)) for s in sizes),
        ranks=ranks,
        nics=nics,
        nics_per_rank=dice.choice([0, 1, 2]),
    )


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_a_hundred_random_divisions_equal_brute_force(solver: str) -> None:
    if solver not in solvers():
        pytest.skip("highspy is not installed")
    solved = 0
    for seed in range(100):
        division = random_division(seed)
        try:
            expected = brute_force(division)
        except PlanError:
            with pytest.raises(PlanError, match="no division keeps to the limits"):
                solve(division, solver)
            continue
        assert solve(division, solver) == expected, seed
        solved += 1
    assert solved > 80


def test_fewest_ranks_among_equally_fast_divisions() -> None:
    """Attention is the bottleneck whatever N is: idle FFN ranks would be as fast."""
    division = Division(
        needs=Needs(attention=8, ffn=1, attention_nic=0.1, ffn_nic=0.1),
        attention=(Size(ranks=4, capacity=4),),
        ffn=ffn_sizes(16, 12),
        ranks=16,
        nics=4,
    )
    assert solve(division) == Split(attention=4, ffn=1, attention_nics=2, ffn_nics=2, seconds=2.0)


def test_sizes_without_a_purpose_are_left_out() -> None:
    assert [size.ranks for size in ffn_sizes(8, 8)] == [1, 2, 3, 4, 8]
    assert [size.ranks for size in attention_sizes(12, 6)] == [1, 2, 3, 4, 6]


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(PlanError, match="no size of the attention or the FFN side fits"):
        Division(needs=Needs(attention=1, ffn=1, attention_nic=1, ffn_nic=1), attention=(), ffn=(), ranks=4, nics=4)
