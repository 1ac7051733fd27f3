"""Formulas of papers on attention-FFN disaggregation in serving, at the costs of a training step.

They know neither bubbles nor memory, and serve as a second opinion on the ratio of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_afd.allocate.formula import Stages
from lightning_afd.placement import Layout


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What they say of one layout."""

    balanced: float
    """FFN ranks per attention rank at which both take as long: the balance of MegaScale-Infer (2504.02263)."""
    least_micro_batches: float
    """m >= 2 (1 + T_c / T_f), below which a transfer is exposed even with one group (MegaScale-Infer)."""
    rectangle: tuple[bool, bool, bool]
    """2602.09721: whether 2 t_a >= t_f + t_c, 2 t_f >= t_a + t_c, and transfers are not the longest part."""
    best_ratio: float
    """r* of 2601.21351, attention ranks per FFN rank: the largest of (t_A - beta) / (alpha B), (t_C - beta) / (alpha B)
    and sqrt(beta / (alpha B)), where t_F = alpha B r + beta."""


def ratios(stages: Stages, layout: Layout, fixed: float) -> Ratios:
    """From the stages of a layout; `fixed` (beta): seconds of experts that do not shrink with fewer rows."""
    attention, ffn = (stages.way(role, "f") + stages.way(role, "b") for role in ("A", "F"))
    transfer = stages.transfer
    longest = max(attention, ffn)
    rows = max(ffn - fixed, 1e-12) * layout.ffn / layout.attention
    return Ratios(
        balanced=ffn / attention * layout.ffn / layout.attention,
        least_micro_batches=2 * (1 + 4 * transfer / longest / 2),
        rectangle=(
            2 * attention >= ffn + 2 * transfer,
            2 * ffn >= attention + 2 * transfer,
            2 * transfer <= longest,
        ),
        best_ratio=max((attention - fixed) / rows, (2 * transfer - fixed) / rows, math.sqrt(fixed / rows)),
    )


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """What packed documents of different lengths cost: all A ranks wait for the one with the most attention."""

    equal: float
    """Sum of squared lengths of a row that is one document."""
    mean: float
    """Of the packed rows."""
    deviation: float
    """Standard deviation between rows."""

    def factor(self, ranks: int) -> float:
        """Attention core time of the slowest of so many ranks over the mean.

        2601.21351: the largest of n nearly normal terms lies E[max Z] standard deviations above their mean, about
        sqrt(2 ln n).
        """
        return 1 + math.sqrt(2 * math.log(ranks)) * self.deviation / self.mean if ranks > 1 else 1.0


def barrier(rows: Sequence[Sequence[int]]) -> Barrier:
    """From samples of packed rows, each the lengths of its documents."""
    sums = [float(sum(length * length for length in row)) for row in rows]
    mean = sum(sums) / len(sums)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in sums) / len(sums))
    return Barrier(equal=float(max(sum(row) for row in rows) ** 2), mean=mean, deviation=deviation)
