"""The Chrome trace of a recording: every action once, on its rank and lane, with an arrow per message."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import recorded, simulated, spans

from lightning_afd.placement import Layout
from lightning_afd.recording import Recording
from lightning_afd.recording.chrome import chrome_trace, write_chrome_trace
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import LANES, Timeline

DEEP = Shape(layers=4, groups=2, micro_batches=5, router_logits=True)
TAILS = Shape(layers=3, micro_batches=4, head="ffn")


def events(recording: Recording, phase: str) -> list[dict[str, Any]]:
    return [event for event in chrome_trace(recording)["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("shape", [Shape(layers=2, micro_batches=3), DEEP, TAILS])
def test_every_action_is_an_event_on_its_rank_and_lane(shape: Shape) -> None:
    recording = recorded(simulated(shape), shape)
    timeline = recording.timeline
    got = Counter((e["pid"], LANES[e["tid"]], e["name"]) for e in events(recording, "X"))
    want = Counter((span.rank, timeline.lane(span), str(span.action)) for span in timeline.spans)
    want.update((reduce.rank, "reduce", str(reduce)) for reduce in timeline.reduces)
    assert got == want
    assert {lane for _, lane, _ in want} == set(LANES)
    programs = recording.schedule().programs
    assert len(events(recording, "X")) == sum(map(len, programs.values())) + 1


@pytest.mark.parametrize("shape", [Shape(layers=2, micro_batches=3), DEEP, TAILS])
def test_times_are_microseconds_in_order(shape: Shape) -> None:
    recording = recorded(simulated(shape), shape)
    timed = [event for event in chrome_trace(recording)["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")
    last = max(event["ts"] + event.get("dur", 0) for event in timed)
    assert last == pytest.approx(recording.timeline.seconds * 1e6)
    assert timed[0]["ts"] == 0


@pytest.mark.parametrize("shape", [Shape(layers=2, micro_batches=3), DEEP, TAILS])
def test_arrows_lead_from_a_send_to_its_receive(shape: Shape) -> None:
    recording = recorded(simulated(shape), shape)
    starts, ends = ({e["id"]: e for e in events(recording, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    slices = {(e["pid"], e["tid"], e["name"]): e for e in events(recording, "X")}
    for number, start in starts.items():
        end = ends[number]
        assert start["name"] == end["name"] and start["ts"] <= end["ts"]
        for arrow, lane in ((start, "send"), (end, "receive")):
            inside = slices[arrow["pid"], LANES.index(lane), arrow["name"]]
            assert inside["ts"] <= arrow["ts"] <= inside["ts"] + inside["dur"] + 1e-6
    receives = sum(recording.timeline.waits(span) for span in recording.timeline.spans)
    assert len(starts) == receives > 0


def test_each_pair_of_ranks_has_its_arrow_and_none_leads_back_in_time() -> None:
    layout = Layout(attention=2, ffn=1)
    late = (*spans("A0f0 0-1, D0f0 1-2", 0), *spans("A0f0 0-3, D0f0 8-9", 1), *spans("D0f0 0-5", 2))
    recording = recorded(Timeline(layout, late), Shape(layers=1, micro_batches=1))
    starts, ends = events(recording, "s"), events(recording, "f")
    assert [(e["pid"], e["ts"]) for e in starts] == [(0, 1e6), (1, 8e6)]
    assert [(e["pid"], e["ts"]) for e in ends] == [(2, 5e6), (2, 8e6)]


def test_file_says_what_ran(tmp_path: Path) -> None:
    recording = recorded()
    path = write_chrome_trace(recording, tmp_path / "trace.json")
    data = json.loads(path.read_text())
    other = data["otherData"]
    assert (other["experts"], other["transport"], other["expert_map"]) == ("loop", "gloo", 3)
    assert (other["order"], other["micro_batches"], other["layout"]) == ("af-pipe", 3, "1A + 1F")
    assert data["displayTimeUnit"] == "ms"
    names = {(e["pid"], e.get("tid"), e["args"].get("name")) for e in data["traceEvents"] if e["ph"] == "M"}
    assert {(0, None, "rank 0 (A0)"), (1, None, "rank 1 (F0)"), (1, 2, "receive"), (0, 3, "reduce")} <= names
    worse = replace(recording, clocks=(recording.clocks[0], replace(recording.clocks[1], accuracy=2e-3)))
    assert chrome_trace(worse)["otherData"]["clock_accuracy_us"] == 2000
