"""Draw a timeline: one row per rank, one box per action, grey where a rank waits for a message."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_afd.timeline import Reduce, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    ("A", "f"): "#4c78a8",
    ("A", "b"): "#1f3f66",
    ("A", "w"): "#12263d",
    ("E", "f"): "#f2a65a",
    ("E", "b"): "#c8621b",
    ("E", "w"): "#8c3d0b",
    ("T", "f"): "#9d7bb0",
    ("T", "b"): "#5d3a70",
}
NAMES = {
    ("A", "f"): "attention forward",
    ("A", "b"): "attention backward",
    ("A", "w"): "attention weight gradient",
    ("E", "f"): "experts forward",
    ("E", "b"): "experts input gradient",
    ("E", "w"): "experts weight gradient",
    ("T", "f"): "head forward",
    ("T", "b"): "head backward",
}
WAIT, SEND, REDUCE = "#d5d5d5", "#6fb58a", "#c9a0a0"


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Write a picture (format by the file's ending) of one step; time in milliseconds from its first action."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = list(timeline.by_rank)
    figure = Figure(figsize=(14, 1.2 + 0.75 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    start, end = timeline.start, timeline.end
    for row, (rank, spans) in enumerate(timeline.by_rank.items()):
        boxes = [(_color(timeline, span), span) for span in spans]
        reduces = [(REDUCE, reduce) for reduce in timeline.reduces if reduce.rank == rank]
        _draw_boxes(axes, row, [*boxes, *reduces], start)
        for _, span in boxes:
            if span.seconds > (end - start) / 55 and (span.action.op, span.action.phase) in COLORS:
                _name_box(axes, row, span, start)
    axes.set_yticks(range(len(ranks)), [_label(timeline, rank) for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=10)
    drawn = {(span.action.op, span.action.phase) for span in timeline.spans}
    handles = [Patch(color=COLORS[key], label=NAMES[key]) for key in COLORS if key in drawn]
    handles += [Patch(color=SEND, label="packing and sending"), Patch(color=WAIT, label="waiting for a message")]
    handles += [Patch(color=REDUCE, label="sum of gradients")] if timeline.reduces else []
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _color(timeline: Timeline, span: Span) -> str:
    return COLORS.get((span.action.op, span.action.phase)) or (WAIT if timeline.waits(span) else SEND)


def _draw_boxes(axes: Axes, row: int, boxes: Iterable[tuple[str, Span | Reduce]], start: float) -> None:
    """Boxes with their colours; all of one colour at once, as matplotlib takes its time for each call."""
    places: dict[str, list[tuple[float, float]]] = {}
    for color, part in boxes:
        places.setdefault(color, []).append(((part.start - start) * 1e3, part.seconds * 1e3))
    for color, own in places.items():
        axes.broken_barh(own, (row - 0.4, 0.8), color=color, linewidth=0)


def _name_box(axes: Axes, row: int, span: Span, start: float) -> None:
    middle = (span.start + span.end) / 2 - start
    axes.text(middle * 1e3, row, str(span.action), ha="center", va="center", fontsize=6, color="white")


def _label(timeline: Timeline, rank: int) -> str:
    return f"{timeline.layout.name_of(rank)}\nwaits {timeline.exposed(rank):.0%}"
