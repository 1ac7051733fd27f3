"""Both timelines: what is drawn where, and what is left out of a step that is too long."""

from __future__ import annotations

import re

from recorded import spans
from reports import run_of, step_of

from lightning_afd.placement import Layout
from lightning_afd.report import lanes
from lightning_afd.report.lanes import Box, Row, boxes_of, draw, rows_of, shown_ranks, window_of
from lightning_afd.report.predict import predict
from lightning_afd.report.timelines import timelines
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Reduce, Timeline

DEEP = Shape(layers=4, groups=2, micro_batches=6, router_logits=True)
SMALL = Timeline(
    Layout(attention=1, ffn=1),
    tuple(spans("A0f0 1-2, D0f0 2-3, C0f0 3-5, A1f0 5-5") + spans("D0f0 1-3, E0f0 3-4", 1)),
    (Reduce(2, 0, 4, 5),),
)


def row(rank: int = 0) -> Row:
    return Row(timeline=SMALL, rank=rank, name="x")


def test_boxes_are_what_took_time_since_the_steps_start() -> None:
    assert list(boxes_of(row())) == [
        Box(kind="Af", start=0, end=1, label="A0f0"),
        Box(kind="send", start=1, end=2, label="D0f0"),
        Box(kind="wait", start=2, end=4, label="C0f0"),
        Box(kind="reduce", start=3, end=4, label="S2"),
    ]
    assert [box.kind for box in boxes_of(row(1))] == ["wait", "Ef"]


def strokes(page: str, kind: str) -> list[tuple[int, int]]:
    """Start and length of what is drawn of a kind."""
    found = re.search(rf'<path d="([^"]*)" class="box {kind}"', page)
    return [(int(x), int(width)) for x, width in re.findall(r"M(\d+) [\d.]+h(\d+)", found[1])] if found else []


def test_boxes_stand_at_their_times() -> None:
    rows = [row(0), row(1)]
    page = draw(rows, window_of(rows), 1)
    (attention,), (experts,) = strokes(page, "Af"), strokes(page, "Ef")
    assert attention[0] == 0 and experts[0] == lanes.UNITS / 2
    assert lanes.UNITS / 4 - 60 <= attention[1] < lanes.UNITS / 4
    assert ">A0f0</text>" in page and ">D0f0</text>" not in page
    assert "attention forward" in page and "head forward" not in page


def test_a_long_step_is_cut_behind_so_many_boxes() -> None:
    rows = [row(0), row(1)]
    assert not window_of(rows).cut
    cut = window_of(rows, most=4)
    assert (cut.seconds, cut.step, cut.cut) == (2, 4, True)
    assert strokes(draw(rows, cut, 1), "wait") == [(0, lanes.UNITS - 60)]
    assert strokes(draw(rows, cut, 1), "Ef") == []


def test_predicted_rows_are_workers_and_measured_ones_ranks() -> None:
    recording = step_of(DEEP)
    run = run_of(recording)
    rows = rows_of(predict(recording, run.waits).timeline, recording.timeline)
    assert [r.name for r in rows] == [
        *("A0", "A1", "F0", "F1"),
        *("rank 0 (A0)", "rank 1 (A1)", "rank 2 (F0)", "rank 3 (F1)"),
    ]
    page = timelines(run)
    both = sum(span.action.op == "E" and span.action.phase == "f" for r in rows[:2] for span in r.timeline.spans)
    assert len(strokes(page, "Ef")) == both
    assert "Shown: the whole step." in page


def test_of_many_ranks_the_first_of_each_worker_are_shown() -> None:
    layout = Layout(attention=12, ffn=20)
    assert shown_ranks(layout, range(32), most=6) == [0, 1, 2, 12, 13, 14]
    assert shown_ranks(layout, range(32), most=32) == list(range(32))


def test_names_wait_for_a_zoom_at_which_they_fit() -> None:
    narrow = Timeline(SMALL.layout, tuple(spans("A0f0 0-1, A0f1 1-1.01, A0f2 2-100")))
    rows = [Row(timeline=narrow, rank=0, name="x")]
    page = draw(rows, window_of(rows), 1)
    zooms = dict(re.findall(r'class="(z\d+)">(A0f\d)<', page))
    assert zooms == {"z4": "A0f0", "z1": "A0f2"}  # A0f1 is too narrow at any zoom
