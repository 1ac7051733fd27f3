"""Pictures of timelines: rows, names where they fit, what colours mean."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import matplotlib
from recorded import simulated, spans

from lightning_afd.draw import REDUCE, WAIT, _boxes, draw_timeline
from lightning_afd.placement import Layout
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Reduce, Timeline

SHORT = Timeline(
    Layout(attention=1, ffn=1), (*spans("A0f0 0-4, D0f0 4-5, C0f0 5-9, A1f0 9-9.1"), *spans("D0f0 0-5, E0f0 5-8", 1))
)


def drawn(timeline: Timeline, folder: Path, **options: object) -> str:
    """A picture as text."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(timeline, folder / "timeline.svg", "a title", **options)  # type: ignore[arg-type]
    return (folder / "timeline.svg").read_text()


def test_rows_names_and_legend(tmp_path: Path) -> None:
    picture = drawn(SHORT, tmp_path)
    for text in (
        "a title",
        "rank 0 (A0)",
        "waits 44%",
        "rank 1 (F0)",
        "A0f0",
        "E0f0",
        "attention forward",
        "packing and",
    ):
        assert text in picture
    for text in ("A1f0", "D0f0", "dispatch", "sum of gradients", "attention backward"):  # too short, or not drawn
        assert text not in picture


def test_messages_on_their_way_have_rows_of_their_own(tmp_path: Path) -> None:
    picture = drawn(SHORT, tmp_path, ways={"A0 sends": [*spans("D0f0 4-6"), Reduce(0, 0, 6, 8)]})
    for text in ("A0 sends", "D0f0", "dispatch", "sum of gradients"):
        assert text in picture


def test_chunks_of_gradients_hide_nothing() -> None:
    chunk = Reduce(0, 0, 1, 3)
    boxes = list(_boxes(replace(SHORT, reduces=(chunk,)), 0))
    assert [(box.part, box.is_stripe) for box in boxes if box.color == REDUCE] == [(chunk, True)]
    assert [str(box.part.action) for box in boxes if box.color == WAIT] == ["C0f0"]  # type: ignore[union-attr]
    lower, height = boxes[-1].bounds
    assert 0 < lower < lower + height <= 0.4


def test_a_whole_step_fits_into_memory_as_well_as_into_a_file() -> None:
    picture = io.BytesIO()
    draw_timeline(simulated(Shape(layers=3, groups=(2, 1), micro_batches=4)), picture)
    assert picture.getvalue().startswith(b"\x89PNG")
