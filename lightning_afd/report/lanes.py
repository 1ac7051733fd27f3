"""Predicted and measured timeline of a step above one another, on one time axis that can be stretched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_afd.draw import COLORS, NAMES, REDUCE, SEND
from lightning_afd.placement import Layout
from lightning_afd.report.markup import element, legend, seconds_text, text, tick_text, ticks
from lightning_afd.timeline import Reduce, Span, Timeline

ROWS = 24
"""Ranks that are drawn at most: the first ones of each worker."""
BOXES = 40_000
"""Boxes that are drawn at most; a longer step is cut behind so many."""
UNITS = 100_000
"""Places along the axis: at the largest zoom one is still less than a pixel."""
ZOOMS = (1, 2, 4, 8, 16, 32)
PAGE = 900
"""Pixels of the axis at zoom 1, about: names are shown where their boxes are wide enough."""
LABELS = 5000


@dataclass(frozen=True, kw_only=True)
class Window:
    """What of a step is drawn, in seconds since its start."""

    seconds: float
    step: float

    @property
    def cut(self) -> bool:
        return self.seconds < self.step


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank of one of the two timelines."""

    timeline: Timeline
    rank: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Box:
    """Something that took time, in seconds since its step's start."""

    kind: str
    """CSS class: op and phase ("Af"), `wait`, `send` or `reduce`."""
    start: float
    end: float
    label: str


def rows_of(predicted: Timeline, measured: Timeline) -> list[Row]:
    """Workers of the predicted step, then ranks of the measured one, no more than ROWS of these."""
    workers = [
        Row(timeline=predicted, rank=rank, name=str(predicted.layout.worker_of(rank))) for rank in predicted.by_rank
    ]
    ranks = [
        Row(timeline=measured, rank=rank, name=measured.layout.name_of(rank))
        for rank in shown_ranks(measured.layout, tuple(measured.by_rank))
    ]
    return workers + ranks


def shown_ranks(layout: Layout, ranks: Sequence[int], most: int = ROWS) -> list[int]:
    """All ranks, or as many first ones of each worker as fit."""
    each = max(1, most // len(layout.workers())) if len(ranks) > most else len(ranks)
    return [rank for rank in ranks if layout.index_of(rank) < each]


def window_of(rows: Sequence[Row], most: int = BOXES) -> Window:
    """The whole of both steps, or up to where so many boxes have begun."""
    step = max(row.timeline.seconds for row in rows)
    starts = sorted(box.start for row in rows for box in boxes_of(row))
    return Window(seconds=starts[most] if len(starts) > most else step, step=step)


def boxes_of(row: Row) -> Iterator[Box]:
    """All that took time on a rank."""
    begin = row.timeline.start
    reduces = (reduce for reduce in row.timeline.reduces if reduce.rank == row.rank)
    parts: Iterator[Span | Reduce] = chain(row.timeline.by_rank.get(row.rank, ()), reduces)
    for part in parts:
        if part.end > part.start:
            kind = _kind(row.timeline, part) if isinstance(part, Span) else "reduce"
            yield Box(
                kind=kind, start=part.start - begin, end=part.end - begin, label=str(getattr(part, "action", part))
            )


def _kind(timeline: Timeline, span: Span) -> str:
    if span.action.is_transfer:
        return "wait" if timeline.waits(span) else "send"
    return span.action.op + span.action.phase


def draw(rows: Sequence[Row], window: Window, first_measured: int) -> str:
    """Both timelines; rows from `first_measured` on are those of the measured one."""
    pitch = 26 if len(rows) <= 12 else 18
    tops = [index * pitch + (28 if index >= first_measured else 6) for index in range(len(rows))]
    height = tops[-1] + pitch
    strokes: dict[str, list[str]] = {}
    boxes = [
        (top, box) for top, row in zip(tops, rows, strict=True) for box in boxes_of(row) if box.start < window.seconds
    ]
    for top, box in boxes:
        strokes.setdefault(box.kind, []).append(_stroke(box, window, top + _middle(box, pitch)))
    paths = (
        element("path", d="".join(d), class_=f"box {kind}", stroke_width=4 if kind == "reduce" else pitch - 6)
        for kind, d in strokes.items()
    )
    ground = "".join(
        element("path", d=f"M0 {top + pitch / 2 - 1}h{UNITS}", class_="idle", stroke_width=pitch - 6) for top in tops
    )
    lanes = element(
        "svg",
        ground + "".join(paths),
        viewBox=f"0 0 {UNITS} {height}",
        preserveAspectRatio="none",
        width="100%",
        height=height,
    )
    inside = _axis(window, height) + lanes + _labels(boxes, window, pitch)
    svg = element("svg", inside, height=height + 20, class_="lanes", role="img")
    names = "".join(
        element("div", text(row.name), style=f"top:{top}px;height:{pitch - 2}px")
        for row, top in zip(rows, tops, strict=True)
    )
    columns = element("div", names, class_="names", style=f"height:{height}px") + element("div", svg, class_="scroll")
    return _buttons() + element("div", columns, class_="timeline upto1") + _legend(strokes)


def _middle(box: Box, pitch: int) -> float:
    """A reduce is drawn along the lower edge, as it may lie below computation."""
    return pitch - 5 if box.kind == "reduce" else pitch / 2 - 1


def _stroke(box: Box, window: Window, y: float) -> str:
    """A little shorter than the box, so that neighbours of one colour stay apart."""
    start, end = (round(min(at / window.seconds, 1) * UNITS) for at in (box.start, box.end))
    return f"M{start} {y:g}h{max(1, end - start - min(60, (end - start) // 12))}"


def _labels(boxes: Sequence[tuple[float, Box]], window: Window, pitch: int) -> str:
    """Names of compute actions, shown from the zoom on at which they fit; the widest ones first, up to LABELS."""
    named = [(top, box) for top, box in boxes if box.kind in KINDS]
    named.sort(key=lambda item: item[1].start - item[1].end)
    found = []
    for top, box in named[:LABELS]:
        width = (box.end - box.start) / window.seconds * PAGE
        zoom = next((zoom for zoom in ZOOMS if width * zoom >= 6.5 * len(box.label) + 2), None)
        middle = (box.start + box.end) / 2 / window.seconds
        if zoom is not None and middle < 1:
            place = {"x": f"{middle * 100:.3f}%", "y": f"{top + pitch / 2 + 2.5:g}"}
            found.append(element("text", box.label, **place, class_=f"z{zoom}"))
    return element("g", "".join(found), class_="labels")


def _axis(window: Window, height: float) -> str:
    """Milliseconds; more of them are shown where the axis is stretched."""
    coarse = ticks(0, window.seconds * 1e3, 8)
    fine = [value for value in ticks(0, window.seconds * 1e3, 64) if not any(abs(value - c) < 1e-9 for c in coarse)]
    return "".join(_tick(value, window, height, "grid") for value in coarse) + element(
        "g", "".join(_tick(value, window, height, "grid") for value in fine), class_="fine"
    )


def _tick(value: float, window: Window, height: float, class_: str) -> str:
    share = value / (window.seconds * 1e3)
    anchor = "start" if share < 0.01 else "end" if share > 0.97 else "middle"
    place = f"{share * 100:.3f}%"
    line = element("line", x1=place, x2=place, y1=0, y2=height, class_=class_)
    return line + element("text", f"{tick_text(value)} ms", x=place, y=height + 14, text_anchor=anchor)


def _buttons() -> str:
    buttons = (
        element("button", f"{zoom}×", type="button", data_zoom=zoom, class_="on" if zoom == 1 else "off")
        for zoom in ZOOMS
    )
    return element("div", "Stretch the time axis: " + "".join(buttons), class_="zooms")


KINDS = {op + phase: NAMES[op, phase] for op, phase in COLORS}
"""CSS class and name of each kind of compute action."""


def colors() -> str:
    """Style rules: the colours of pictures of timelines, for boxes and for parts of bars."""
    kinds = {op + phase: color for (op, phase), color in COLORS.items()}
    kinds |= {"send": SEND, "reduce": REDUCE, "compute": COLORS["A", "f"]}
    return "\n".join(f".{kind} {{ --c: {color} }}" for kind, color in kinds.items())


def _legend(kinds: Iterable[str]) -> str:
    names = {**KINDS, "send": "packing and sending", "wait": "waiting for a message", "reduce": "sum of gradients"}
    return legend((f"box {kind}", name) for kind, name in names.items() if kind in kinds)


def caption(window: Window) -> str:
    """What of the step is shown."""
    return (
        f"the first {seconds_text(window.seconds)} of {seconds_text(window.step)}" if window.cut else "the whole step"
    )
