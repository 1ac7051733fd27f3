"""A predicted step is the measured one where nothing varies; costs of the schedule move it, chance does not."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from recorded import recorded, spans
from reports import BYTES, LINK, step_of

from lightning_afd.placement import Layout
from lightning_afd.recording import Recording
from lightning_afd.report.predict import Prediction, bytes_by_kind, fit, link_of, predict
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Reduce, Span, Timeline
from lightning_afd.waits import waits_of

ONE = Shape(layers=3, micro_batches=4)
DEEP = Shape(layers=4, groups=2, micro_batches=6, router_logits=True)


def predicted(recording: Recording) -> Prediction:
    return predict(recording, waits_of(recording.timeline, recording.shape))


@pytest.mark.parametrize(
    ("shape", "order"), [(ONE, "af-pipe"), (ONE, "sequential"), (DEEP, "af-pipe"), (DEEP, "zero-bubble")]
)
def test_a_step_without_chance_is_predicted_as_it_was(shape: Shape, order: str) -> None:
    recording = step_of(shape, order)
    found = predicted(recording)
    assert found.observed > 0
    assert found.timeline.seconds == pytest.approx(recording.timeline.seconds, rel=0.02)
    executed = {rank: [span.action for span in own] for rank, own in recording.timeline.by_rank.items()}
    assert {rank: [span.action for span in own] for rank, own in found.timeline.by_rank.items()} == executed


def test_link_is_measured_by_messages_that_were_waited_for() -> None:
    recording = step_of(ONE, "sequential")
    found = predicted(recording)
    assert found.link.latency == pytest.approx(LINK.latency)
    assert found.link.attention == found.link.ffn == pytest.approx(LINK.attention)
    assert bytes_by_kind(recording) == {kind: BYTES[kind] for kind in ("Df", "Cf", "Db", "Cb")}


def stretched(recording: Recording, op: str, factor: float, micro_batches: tuple[int, ...]) -> Recording:
    """The recording with longer actions, in place: what follows is not moved, only medians are read."""
    changed = (
        replace(span, end=span.start + factor * span.seconds)
        if span.action.op == op and span.action.micro_batch in micro_batches
        else span
        for span in recording.timeline.spans
    )
    return replace(recording, timeline=replace(recording.timeline, spans=tuple(changed)))


def test_one_late_action_changes_nothing_and_all_of_them_do() -> None:
    recording = step_of(ONE, "sequential")
    usual = predicted(recording).timeline.seconds
    assert predicted(stretched(recording, "E", 3, (1,))).timeline.seconds == pytest.approx(usual)
    experts = sum(
        span.seconds for span in recording.timeline.spans if span.action.op == "E" and span.action.phase != "w"
    )
    slower = predicted(stretched(recording, "E", 3, (0, 1, 2, 3))).timeline.seconds
    assert slower >= usual + 2 * experts - 1e-9


def test_slowest_rank_of_a_worker_counts() -> None:
    layout = Layout(attention=1, ffn=2)
    timeline = Timeline(layout, tuple(spans("A0f0 0-1") + spans("E0f0 1-2", 1) + spans("E0f0 1-5", 2)))
    recording = recorded(timeline, Shape(layers=1, micro_batches=1), traffic=())
    experts = [span for span in predict(recording, ()).timeline.spans if str(span.action) == "E0f0"]
    assert [span.seconds for span in experts] == [4.0]


def test_messages_that_nobody_waited_for_take_no_time() -> None:
    assert link_of((), {"Df": 5.0}) == (replace(LINK, attention=inf, ffn=inf, latency=0.0), 0)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 3, 1), (3, 7, 1)], (1.0, 2.0)),
        ([(1, 3, 1), (3, 7, 1), (9, 9, 0)], (1.0, 2.0)),
        ([(5, 3, 1), (5, 5, 3)], (4.5, 0.0)),  # one size only
        ([(1, 5, 1), (3, 3, 1)], (4.0, 0.0)),  # larger messages were faster
        ([(1, 0, 1), (3, 10, 1)], (0.0, 3.0)),  # would start below 0
        ([], (0.0, 0.0)),
    ],
)
def test_line_through_points(points: list[tuple[float, float, float]], line: tuple[float, float]) -> None:
    assert fit(points) == pytest.approx(line)


def with_reduce(recording: Recording, after: str, seconds: float) -> tuple[Recording, Span]:
    """The recording with a reduce on rank 0 right behind the last action of that name."""
    last = [span for span in recording.timeline.by_rank[0] if str(span.action).startswith(after)][-1]
    reduce = Reduce(0, 0, last.end, last.end + seconds, 64)
    return replace(recording, timeline=replace(recording.timeline, reduces=(reduce,))), last


def test_sums_of_gradients_start_behind_the_same_layer() -> None:
    recording = step_of(ONE)
    behind_all, _ = with_reduce(recording, "A0b", 0.5)
    amid, last = with_reduce(recording, "A2b", 0.01)
    assert predicted(behind_all).timeline.seconds == pytest.approx(predicted(recording).timeline.seconds + 0.5)
    (reduce,) = predicted(amid).timeline.reduces
    own = [s for s in predicted(amid).timeline.by_rank[0] if s.action == last.action]
    assert (reduce.start, reduce.seconds) == (own[0].end, pytest.approx(0.01))
    assert predicted(amid).timeline.seconds == pytest.approx(predicted(recording).timeline.seconds)
