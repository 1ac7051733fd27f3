"""Pictures as inline SVG: places across the page are percentages, so that they stretch and their texts don't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_afd.report.markup import element, text, tick_text, ticks

MOST_POINTS = 600
LEVELS = (0.25, 0.5, 0.8, 1.25, 1.6, 2.0, 2.5, 3.0)
"""Bounds between the shades of a heat map, as multiples of the row's mean; 0 has a colour of its own."""
MOST_TEXTS = 400
"""Cells of a heat map with more than these get no numbers."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    color: str = "c0"
    """CSS class with a stroke."""
    marks: bool = False
    """Whether each point gets a dot: they are few, and the line between them is only a guide."""


def line_chart(curves: Sequence[Curve], x_name: str, *, height: int = 200, also: Sequence[float] = ()) -> str:
    """Lines over a common x axis; each curve has at least one point. The y axis reaches the values of `also`, too."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points] + list(also)
    x_range, y_range = _widened(min(xs), max(xs), 0.0), _widened(min(ys), max(ys), 0.08)
    inner, marks = [], []
    for curve in curves:
        places = [(_share(x, x_range), 1 - _share(y, y_range)) for x, y in _thinned(curve.points)]
        line = " ".join(f"{x * 1000:.0f},{y * height:.1f}" for x, y in places)
        inner.append(element("polyline", points=line, class_=f"line {curve.color}"))
        if curve.marks or len(places) == 1:
            marks += [_dot(x, y * height, curve.color) for x, y in places]
    lines = _stretched("".join(inner), 1000, height)
    axes = _y_axis(y_range, height) + _x_axis(x_range, height)
    body = f"{axes}{lines}{''.join(marks)}"
    label = element("div", text(x_name), class_="x-name")
    svg = element("svg", body, width="100%", height=height + 20, class_="chart", role="img")
    return element("div", svg + label, class_="chart-box")


def _dot(x: float, y: float, color: str) -> str:
    return element("circle", cx=f"{x * 100:.2f}%", cy=f"{y:.1f}", r=3, class_=f"dot {color}")


def _x_axis(x_range: tuple[float, float], height: int) -> str:
    marks = []
    for value in ticks(*x_range):
        share = _share(value, x_range)
        place, anchor = f"{share * 100:.2f}%", "start" if share < 0.02 else "end" if share > 0.98 else "middle"
        marks.append(element("line", x1=place, x2=place, y1=0, y2=height, class_="grid"))
        marks.append(element("text", tick_text(value), x=place, y=height + 14, text_anchor=anchor))
    return "".join(marks)


def _y_axis(y_range: tuple[float, float], height: int) -> str:
    marks = []
    for value in ticks(*y_range, count=4):
        y = (1 - _share(value, y_range)) * height
        marks.append(element("line", x1="0%", x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        marks.append(element("text", tick_text(value), x=-6, y=f"{y + 4:.1f}", text_anchor="end"))
    return "".join(marks)


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    """A range with room beyond its ends; one value alone gets some around it."""
    room = (high - low) * share if high > low else abs(low) * 0.1 or 1.0
    return low - room, high + room


def _share(value: float, bounds: tuple[float, float]) -> float:
    return (value - bounds[0]) / (bounds[1] - bounds[0])


def _thinned(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Every so-manieth point and the last one, so that the page stays small."""
    stride = -(-len(points) // MOST_POINTS)
    return [*points[:-1:stride], points[-1]]


def _stretched(content: str, width: float, height: float) -> str:
    """Coordinates that follow the page's width, while heights stay."""
    return element(
        "svg", content, viewBox=f"0 0 {width} {height}", preserveAspectRatio="none", width="100%", height=height
    )


def stacked_bar(shares: Mapping[str, float]) -> str:
    """One bar of parts (CSS class: share of the whole width, 0..1)."""
    parts, left = [], 0.0
    for name, share in shares.items():
        if share > 0:
            parts.append(element("rect", x=f"{left * 100:.2f}%", width=f"{share * 100:.2f}%", height=16, class_=name))
            left += share
    return element("svg", "".join(parts), width="100%", height=16, class_="bar", role="img")


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Non-negative numbers by row and column; shades tell how far each is from its row's mean."""

    rows: tuple[tuple[float, ...], ...]
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    borders: tuple[int, ...] = ()
    """Columns before which a line is drawn."""

    def levels(self) -> list[list[int]]:
        """0 for nothing at all, else 1 to len(LEVELS) + 1."""
        return [[level_of(value, sum(row) / max(len(row), 1)) for value in row] for row in self.rows]


def level_of(value: float, mean: float) -> int:
    """Shade of a number in a row with a mean."""
    return 0 if value <= 0 else 1 + sum(value / mean >= bound for bound in LEVELS)


def heat_map(data: HeatMap) -> str:
    """The map with its names, and numbers in the cells where there are few."""
    columns = len(data.column_names)
    cell = 18 if len(data.rows) <= 40 else 8
    height = len(data.rows) * cell
    inner = _stretched(_shades(data.levels()) + _borders(data.borders, len(data.rows)), columns, len(data.rows))
    inner = inner.replace(f'height="{len(data.rows)}"', f'height="{height}"', 1)
    every = -(-len(data.rows) // (30 if cell < 18 else 40))
    names = [
        element("text", text(name), x=-6, y=row * cell + cell / 2 + 4, text_anchor="end")
        for row, name in enumerate(data.row_names)
        if row % every == 0
    ]
    texts = "".join(names) + _column_names(data, height) + _numbers(data, cell)
    return element(
        "div", element("svg", inner + texts, width="100%", height=height + 18, class_="chart"), class_="chart-box heat"
    )


def _shades(levels: list[list[int]]) -> str:
    """One path per shade, of horizontal strokes as high as a row."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(levels):
        x = 0
        for level, run in groupby(row):
            width = len(list(run))
            paths.setdefault(level, []).append(f"M{x} {y}.5h{width}")
            x += width
    return "".join(element("path", d="".join(runs), class_=f"h{level}") for level, runs in sorted(paths.items()))


def _borders(columns: Sequence[int], rows: int) -> str:
    return element("path", d="".join(f"M{x} 0v{rows}" for x in columns), class_="border") if columns else ""


def _column_names(data: HeatMap, height: int) -> str:
    count = len(data.column_names)
    every = -(-count // 32)
    return "".join(
        element("text", text(name), x=f"{(index + 0.5) / count * 100:.2f}%", y=height + 13, text_anchor="middle")
        for index, name in enumerate(data.column_names)
        if index % every == 0
    )


def _numbers(data: HeatMap, cell: int) -> str:
    columns = len(data.column_names)
    if len(data.rows) * columns > MOST_TEXTS or columns > 20 or cell < 18:
        return ""
    return "".join(
        element(
            "text",
            f"{value:,.0f}",
            x=f"{(x + 0.5) / columns * 100:.2f}%",
            y=y * cell + cell / 2 + 4,
            text_anchor="middle",
            class_=f"n{level}",
        )
        for y, (row, levels) in enumerate(zip(data.rows, data.levels(), strict=True))
        for x, (value, level) in enumerate(zip(row, levels, strict=True))
    )
