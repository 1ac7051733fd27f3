"""Exposed communication is the share of a step that a rank spends in receives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded import spans

from lightning_afd.placement import Layout, Role, Worker
from lightning_afd.timeline import Timeline, exposed_share, waiting_seconds

ATTENTION = "A0f0 10-13, D0f0 13-14, A0f1 14-15, C0f0 15-17, A1f0 17-18, C0b0 19-20"
FFN = "D0f0 11-14, E0f0 14-15, C0f0 15-16, D0b0 16-18.5, E0b0 18.5-19"


def test_attention_ranks_wait_for_combines_and_ffn_ranks_for_dispatches() -> None:
    assert waiting_seconds(spans(ATTENTION), "A") == 3.0
    assert waiting_seconds(spans(FFN), "F") == 5.5
    assert exposed_share(spans(ATTENTION), "A") == pytest.approx(3.0 / 10.0)
    assert exposed_share(spans(FFN), "F") == pytest.approx(5.5 / 8.0)
    assert spans(ATTENTION)[3].seconds == 2.0


@pytest.mark.parametrize(
    ("text", "role", "seconds"),
    [
        ("A1f0 0-1, H1f0 1-2, L1f0 2-4, H0f0 4-8, H1b0 8-16, A1b0 16-17, H0b0 17-18", "A", 12.0),  # A1 of two groups
        ("A0f0 0-1, A1f0 1-2, H1f0 2-4, H1b0 4-8, L0b0 8-16", "A", 12.0),  # the tail is on F
        ("H1f0 0-1, L0f0 1-3, T1f0 3-4, T1b0 4-5, H1b0 5-6, L0b0 6-7", "F", 3.0),  # here
    ],
)
def test_hops_and_router_logits_are_waited_for_at_their_receiver(text: str, role: Role, seconds: float) -> None:
    assert waiting_seconds(spans(text), role) == seconds


@pytest.mark.parametrize("text", ["A0f0 5-5", "C0f0 5-5"])
def test_step_without_duration_waits_for_nothing(text: str) -> None:
    assert exposed_share([], "A") == 0.0
    assert exposed_share(spans(text), "A") == 0.0


def test_a_rank_with_both_roles_waits_as_each() -> None:
    both = [*spans("D0f0 0-1, A0f1 1-2"), *spans("D0f0 2-5, E0f0 5-6, C0f0 6-7"), *spans("C0f0 7-8")]
    workers = [Worker(role, 0) for role in "AAFFFA"]
    mine = [replace(span, worker=worker) for span, worker in zip(both, workers, strict=True)]
    timeline = Timeline(Layout.together(1), tuple(mine))
    assert [str(span.action) for span in mine if timeline.waits(span)] == ["D0f0", "C0f0"]
    assert timeline.exposed(0) == pytest.approx(4 / 8)


def test_timeline_tells_ranks_and_roles_apart() -> None:
    timeline = Timeline(Layout(attention=1, ffn=1), (*spans(ATTENTION, 0), *spans(FFN, 1)))
    assert timeline.exposed(0) == pytest.approx(0.3)
    assert timeline.exposed(1) == pytest.approx(5.5 / 8)
    assert (timeline.start, timeline.end, timeline.seconds) == (10.0, 20.0, 10.0)
    assert [timeline.lane(span) for span in spans(ATTENTION)[:4]] == ["compute", "send", "compute", "receive"]
    waits = [str(span.action) for span in timeline.spans if timeline.waits(span)]
    assert waits == ["C0f0", "C0b0", "D0f0", "D0b0"]
