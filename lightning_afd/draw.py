"""Draw a timeline: one row per rank, one box per action, grey where a rank waits for a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from lightning_afd.timeline import Reduce, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

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
TRAVEL = {"D": "#3d8f63", "C": "#79b894", "H": "#a5893a", "L": "#c9b878"}
TRAVELS = {"D": "dispatch", "C": "combine", "H": "hop", "L": "router logits"}

Part = Span | Reduce
Ways = Mapping[str, Sequence[Part]]
"""Rows beside those of ranks, by name: messages on their way, and chunks of gradients among them."""
_NO_WAYS: Ways = MappingProxyType({})
_CHARACTERS = 270
"""Of a name that fit side by side into the picture."""


@dataclass(frozen=True, kw_only=True)
class _Box:
    """A part of a row; a stripe lies along its lower edge, as it may be below computation."""

    color: str
    part: Part
    is_stripe: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower edge and height, in rows from the row's middle (which grow downwards)."""
        return (0.24, 0.16) if self.is_stripe else (-0.4, 0.8)


def draw_timeline(timeline: Timeline, path: str | Path | IO[bytes], title: str = "", ways: Ways = _NO_WAYS) -> None:
    """Write a picture of one step (format by the file's ending: png, svg or pdf).

    Rows are the ranks of the timeline, then `ways`, whose messages a simulation knows (`Simulation.transfers`) and a
    measured step does not. Time is in milliseconds from the first action.
    """
    from matplotlib.figure import Figure

    rows = {_label(timeline, rank): list(_boxes(timeline, rank)) for rank in timeline.by_rank}
    rows |= {name: [_travel(part) for part in parts] for name, parts in ways.items()}
    figure = Figure(figsize=(14, 1.2 + 0.75 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, boxes in enumerate(rows.values()):
        _draw_boxes(axes, row, boxes, timeline)
        _name_boxes(axes, row, boxes, timeline)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.seconds * 1e3)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=10)
    handles = list(_legend([box for boxes in rows.values() for box in boxes]))
    columns = len(handles) if len(handles) < 10 else (len(handles) + 1) // 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _boxes(timeline: Timeline, rank: int) -> Iterator[_Box]:
    """What a rank does."""
    for span in timeline.by_rank[rank]:
        if not span.seconds:
            continue
        color = COLORS.get((span.action.op, span.action.phase)) or (WAIT if timeline.waits(span) else SEND)
        yield _Box(color=color, part=span)
    for reduce in timeline.reduces:
        if reduce.rank == rank:
            yield _Box(color=REDUCE, part=reduce, is_stripe=True)


def _travel(part: Part) -> _Box:
    return _Box(color=TRAVEL[part.action.op] if isinstance(part, Span) else REDUCE, part=part)


def _draw_boxes(axes: Axes, row: int, boxes: Iterable[_Box], timeline: Timeline) -> None:
    """Boxes with their colours; all of one colour at once, as matplotlib takes its time for each call.

    Each is a little shorter than what it stands for, so that neighbours of one colour stay apart.
    """
    places: dict[tuple[str, tuple[float, float]], list[tuple[float, float]]] = {}
    for box in boxes:
        shown = box.part.seconds - min(box.part.seconds / 12, timeline.seconds / 1000)
        places.setdefault((box.color, box.bounds), []).append(((box.part.start - timeline.start) * 1e3, shown * 1e3))
    for (color, (edge, height)), own in places.items():
        axes.broken_barh(own, (row + edge, height), color=color, linewidth=0)


def _name_boxes(axes: Axes, row: int, boxes: Iterable[_Box], timeline: Timeline) -> None:
    """Names of what is computed or travels, where they fit."""
    named = {*COLORS.values(), *TRAVEL.values()}
    for box in boxes:
        name, middle = _name(box.part), (box.part.start + box.part.end) / 2 - timeline.start
        if box.color in named and box.part.seconds * _CHARACTERS > timeline.seconds * len(name):
            axes.text(middle * 1e3, row, name, ha="center", va="center", fontsize=6, color="white")


def _name(part: Part) -> str:
    return str(part.action) if isinstance(part, Span) else str(part)


def _label(timeline: Timeline, rank: int) -> str:
    return f"{timeline.layout.name_of(rank)}\nwaits {timeline.exposed(rank):.0%}"


def _legend(boxes: Sequence[_Box]) -> Iterator[Patch]:
    """What the colours mean that are drawn."""
    from matplotlib.patches import Patch

    drawn = {box.color for box in boxes}
    for colors, names in ((COLORS, NAMES), (TRAVEL, TRAVELS)):
        for key, color in colors.items():
            if color in drawn:
                yield Patch(color=color, label=names[key])  # type: ignore[index]
    others = {SEND: "packing and sending", WAIT: "waiting for a message", REDUCE: "sum of gradients"}
    for color, name in others.items():
        if color in drawn:
            yield Patch(color=color, label=name)
