"""A picture of a result: how long contenders take, beside their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_afd.bench.ratios import Spread
from lightning_afd.bench.result import Result, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST, OTHER, BOUND = "#c8621b", "#4c78a8", "#222222"


def draw(result: Result, path: Path) -> None:
    """Write it; one panel per section, a bar per contender with quartiles, a mark at its bound."""
    from matplotlib.figure import Figure

    count = len(result.sections)
    longest = max(len(section.measured) for section in result.sections)
    figure = Figure(figsize=(1.5 + 4.5 * count, 1.6 + 0.4 * longest), layout="constrained")
    for axes, section in zip(figure.subplots(1, count, squeeze=False)[0], result.sections, strict=True):
        _panel(axes, section)
    figure.suptitle(
        "seconds per step (bar: median, line: quartiles, |: its bound); x: times the first one's", fontsize=9
    )
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, section: Section) -> None:
    for row, one in enumerate(section.measured):
        step = Spread.of(one.seconds)
        error = [[step.median - step.low], [step.high - step.median]]
        axes.barh(row, step.median, xerr=error, color=OTHER if row else FIRST, height=0.7)
        if one.bounds:
            bound = Spread.of(one.bounds).median
            axes.plot([bound, bound], [row - 0.4, row + 0.4], color=BOUND)
        ratio = f" {section.ratio(one.name).median:.2f}x" if row else ""
        axes.text(step.high, row, ratio, va="center", fontsize=8)
    axes.set_yticks(range(len(section.measured)), [one.name for one in section.measured])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(section.title, loc="left", fontsize=10)
