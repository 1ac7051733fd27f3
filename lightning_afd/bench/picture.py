"""A picture of a result: how long contenders take beside their bounds, where the first one wins and loses, or links."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, log2, nan
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_afd.bench.ratios import Spread
from lightning_afd.bench.result import Probe, Result, Section
from lightning_afd.bench.sweep_lines import draw_lines
from lightning_afd.bench.tables import IN_FULL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST, OTHER, BOUND = "#c8621b", "#4c78a8", "#222222"
STRONG = 1.0
"""Powers of two at which a color is at its strongest."""


def draw(result: Result, path: Path) -> None:
    """Write it: panels of bars for a few sections, a map of ratios for more of them, links where nothing else is."""
    if not result.sections:
        _draw_links(result.probes, path)
        return
    if len(result.sections) > IN_FULL and result.picture == "lines":
        draw_lines(result.sections, path)
    elif len(result.sections) > IN_FULL and len(result.sections[0].measured) > 1:
        _draw_map(result, path)
    else:
        _draw_bars(result.sections[:IN_FULL], path)


def _draw_bars(sections: list[Section], path: Path) -> None:
    """A panel per section, a bar per contender with quartiles, a mark at its bound."""
    from matplotlib.figure import Figure

    longest = max(len(section.measured) for section in sections)
    figure = Figure(figsize=(1.5 + 4.5 * len(sections), 1.6 + 0.4 * longest), layout="constrained")
    for axes, section in zip(figure.subplots(1, len(sections), squeeze=False)[0], sections, strict=True):
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


def _draw_links(probes: Sequence[Probe], path: Path) -> None:
    """Time of a message, and bits per second of many, against the size of a message."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, rates = figure.subplots(1, 2)
    for rate, kind in dict.fromkeys((probe.rate, probe.kind) for probe in probes):
        own = [probe for probe in probes if (probe.rate, probe.kind) == (rate, kind)]
        sizes = [probe.nbytes / 1024 for probe in own]
        label, style = f"{rate}, {kind}", {"one way": "-", "both ways": "--", "incast": ":"}[kind]
        times.loglog(sizes, [probe.seconds["p50"] * 1e3 for probe in own], style, label=label)
        rates.loglog(sizes, [probe.bandwidth * 8 / 1e9 for probe in own], style, label=label)
    for axes, title in ((times, "ms of one message (P50)"), (rates, "Gbit/s of many, as they come in")):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("KiB of a message")
    times.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _draw_map(result: Result, path: Path) -> None:
    """A row per section, a column per contender: how many times as long its step takes as the first one's."""
    from matplotlib.figure import Figure

    sections = result.sections
    first, *others = dict.fromkeys(one.name for section in sections for one in section.measured)
    ratios = [[_ratio(section, name) for name in others] for section in sections]
    figure = Figure(figsize=(4.5 + 1.3 * len(others), 1.4 + 0.35 * len(sections)), layout="constrained")
    axes = figure.subplots()
    powers = [[log2(ratio) for ratio in row] for row in ratios]
    axes.imshow(powers, cmap="PuOr_r", vmin=-STRONG, vmax=STRONG, aspect="auto")
    for y, row in enumerate(ratios):
        for x, ratio in enumerate(row):
            color = "white" if abs(log2(ratio)) > 0.6 * STRONG else "black"
            axes.text(x, y, "-" if isnan(ratio) else f"{ratio:.2f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(others)), others, fontsize=8)
    axes.set_yticks(range(len(sections)), [section.title for section in sections], fontsize=8)
    axes.set_title(
        f"step over that of {first}: orange where {first} wins, violet where it loses", loc="left", fontsize=9
    )
    figure.savefig(path, dpi=110)


def _ratio(section: Section, name: str) -> float:
    """Not a number where the contender was left out."""
    return section.ratio(name).median if name in {one.name for one in section.measured} else nan
