"""Layouts that are decided at the start of a fit: chosen as planned, followed by all ranks, and the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import join
from fits import worst
from planning_cases import alone, apart, fit, together
from pool import RankPool


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_arrange_themselves_by_the_plan(pool: RankPool, tmp_path: Path, world: int) -> None:
    ranks = pool.run(fit, world, world, apart, {}, tmp_path)
    first = ranks[0]
    print(first.said)
    assert {rank.layout for rank in ranks} == {first.layout} == {"1A + 1F" if world == 2 else "3A + 1F"}
    assert all(rank.arrangement == first.arrangement and rank.measured == 1 for rank in ranks)
    plain = alone(first.arrangement.layout.attention)
    assert first.losses == pytest.approx(plain.losses, rel=1e-10)
    assert worst(join([rank.gradients for rank in ranks]), plain.gradients)[0] <= 1e-9
    assert worst(join([rank.weights for rank in ranks]), plain.weights)[0] <= 1e-9


def test_where_separate_ranks_lose_all_get_both_roles(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(fit, 2, 2, together, {}, tmp_path)
    print(ranks[0].said)
    assert {rank.layout for rank in ranks} == {"2 collocated"}
