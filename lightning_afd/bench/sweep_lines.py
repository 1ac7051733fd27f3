"""A picture of a sweep: seconds per step and memory of each contender over what was changed, a panel per change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_afd.bench.ratios import Spread
from lightning_afd.bench.result import Measured, Section
from lightning_afd.bench.settings import WORKLOAD

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_lines(sections: Sequence[Section], path: Path) -> None:
    """Write it: a column of panels per group of settings that were changed together."""
    from matplotlib.figure import Figure

    columns = by_change(sections)
    figure = Figure(figsize=(1 + 3.2 * len(columns), 6), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False)
    for column, (names, own) in enumerate(columns.items()):
        _lines(axes[0][column], names, own, "seconds")
        _lines(axes[1][column], names, own, "memory")
    axes[0][0].set_ylabel("seconds per step (median, quartiles)", fontsize=9)
    axes[1][0].set_ylabel("MB by which the fullest rank grows", fontsize=9)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def by_change(sections: Sequence[Section]) -> dict[tuple[str, ...], list[Section]]:
    """Sections by the names of the settings that they change, in order."""
    found: dict[tuple[str, ...], list[Section]] = {}
    for section in sections:
        found.setdefault(tuple(section.cell), []).append(section)
    return found


def _lines(axes: Axes, names: tuple[str, ...], sections: Sequence[Section], what: str) -> None:
    """One line per contender, which has gaps where it was left out."""
    contenders = dict.fromkeys(one.name for section in sections for one in section.measured)
    for name in contenders:
        points = [
            (x, *_point(one, what))
            for x, section in enumerate(sections)
            for one in section.measured
            if one.name == name
        ]
        places, middles, below, above = zip(*points, strict=True)
        axes.errorbar(places, middles, (below, above), marker="o", markersize=3, capsize=2, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(sections)), ["/".join(map(str, section.cell.values())) for section in sections])
    axes.set_xlabel(" / ".join(name.removeprefix(WORKLOAD) for name in names), fontsize=9)


def _point(one: Measured, what: str) -> tuple[float, float, float]:
    """Middle of an error bar, and how far it reaches down and up."""
    if what == "memory":
        return max(one.memory.values(), default=0) / 1e6, 0.0, 0.0
    step = Spread.of(one.seconds)
    return step.median, step.median - step.low, step.high - step.median
