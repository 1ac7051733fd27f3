"""Formulas of serving papers at stages whose answers are known, and the barrier of packed documents."""

from __future__ import annotations

import math

import pytest

from lightning_afd.allocate.formula import Stages, formula_seconds
from lightning_afd.allocate.ratios import barrier, ratios
from lightning_afd.placement import Layout


def stages(transfer: float = 0.5, *, ffn: float = 1.0, groups: int = 2, rounds: int = 3) -> Stages:
    """Attention 1 forward and 2 backward, experts the same times `ffn`."""
    return Stages(
        groups=groups,
        rounds=rounds,
        busy=3 * max(1.0, ffn),
        compute={("A", "f"): 1, ("A", "b"): 2, ("F", "f"): ffn, ("F", "b"): ffn, ("F", "w"): ffn},
        tail=0.0,
        links={"f": 0.0, "b": 0.0},
        transfer=transfer,
    )


def test_equal_sides_are_balanced_and_hold_the_conditions() -> None:
    found = ratios(stages(), Layout(attention=4, ffn=4), fixed=0.0)
    assert found.balanced == pytest.approx(1.0)
    assert found.best_ratio == pytest.approx(1.0)
    assert found.rectangle == (True, True, True)


def test_slow_experts_want_more_ranks_and_slow_transfers_break_the_last_condition() -> None:
    assert ratios(stages(ffn=2.0), Layout(attention=4, ffn=4), fixed=0.0).balanced == pytest.approx(2.0)
    assert ratios(stages(transfer=5.0), Layout(attention=4, ffn=4), fixed=0.0).rectangle[2] is False


@pytest.mark.parametrize("runs", [1, 2, 3])
@pytest.mark.parametrize("transfer", [0.0, 0.5, 1.0])
def test_formula_is_the_law_for_equal_stages(transfer: float, runs: int) -> None:
    """(P - 1)(F + B + 2c) with runs of 2P, to the half forward that experts' late weight gradients save."""
    shape = stages(transfer)
    overhead = formula_seconds(shape, 8 * runs, 8) - 8 * runs * 3 * 3
    assert overhead == pytest.approx(3 * (3 + 2 * transfer) - 2, abs=0.01)


def test_one_document_per_row_is_no_barrier_and_mixed_ones_are() -> None:
    assert barrier([[8], [8]]).factor(16) == 1.0
    mixed = barrier([[8], [4, 4]])
    assert (mixed.equal, mixed.mean, mixed.deviation) == (64, 48, 16)
    assert mixed.factor(8) == pytest.approx(1 + math.sqrt(2 * math.log(8)) / 3)
    assert mixed.factor(1) == 1.0
