"""A recording is one small file that comes back as it was, or with a sentence about what is wrong with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from recorded import recorded, simulated

from lightning_afd.errors import RecordingError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.recording import NicTraffic, Recording, load, recordings_in, save, write_chrome_trace
from lightning_afd.recording.saved import encode
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import Knobs, build
from lightning_afd.schedule.shape import Shape

UNEQUAL = Shape(layers=4, groups=(2, 1), micro_batches=3)
DEEP = Shape(layers=4, groups=2, micro_batches=6, router_logits=True)


@pytest.mark.parametrize(
    "recording",
    [
        recorded(),
        recorded(simulated(DEEP), DEEP),
        recorded(simulated(UNEQUAL), UNEQUAL),
        recorded(order="zero-bubble", knobs=Knobs(group=3, pending=2, pace=Pace(transfer=0.25))),
        recorded(expert_maps=(ExpertMap((0, 0, 0), version=7), ExpertMap((0, 0, 0)))),
        recorded(loss=math.inf),
        recorded(nics=(NicTraffic(0, "eth0", 1000, 20), NicTraffic(1, "mlx5_0", 3, 4))),
    ],
)
def test_recording_comes_back_as_it_was(recording: Recording, tmp_path: Path) -> None:
    path = save(recording, tmp_path / "trace")
    assert path == tmp_path / "trace" / "step-00000050.json"
    assert load(path) == recording
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_recordings_of_a_run_stand_in_the_order_of_steps(tmp_path: Path) -> None:
    assert recordings_in(tmp_path) == []
    steps = (150, 50, 10**9)
    paths = {step: save(recorded(global_step=step), tmp_path / "trace") for step in steps}
    write_chrome_trace(recorded(), tmp_path / "trace" / "step-00000050.chrome.json")
    assert recordings_in(tmp_path) == [paths[step] for step in sorted(steps)]


def test_loss_may_be_no_number(tmp_path: Path) -> None:
    assert math.isnan(load(save(recorded(loss=math.nan), tmp_path)).loss)


def test_recordings_without_counters_of_nics_are_read(tmp_path: Path) -> None:
    path = save(recorded(), tmp_path)
    data = json.loads(path.read_text())
    del data["nics"]
    path.write_text(json.dumps(data))
    assert load(path) == recorded()


def test_schedule_and_tokens_per_rank_are_those_of_the_step() -> None:
    recording = recorded()
    schedule = recording.schedule()
    assert schedule == build("af-pipe", recording.shape)
    executed = {w: p for w, p in schedule.programs.items() if p}
    ranks = recording.timeline.by_rank
    assert [tuple(s.action for s in own) for own in ranks.values()] == list(executed.values())
    uneven = recorded(expert_maps=(ExpertMap((0, 0, 0)),) * 2)
    assert uneven.tokens_per_rank() == ((12,), (12,))


def test_an_action_takes_few_bytes() -> None:
    """Times of a step of seconds in nanoseconds: 8 digits of length, a few of the gap."""
    shape = Shape(layers=16, micro_batches=32)
    rows = encode(recorded(simulated(shape), shape))["spans"]
    actions = sum(len(row["ns"]) // 2 for row in rows)
    assert actions > 5000
    assert len(json.dumps(rows, separators=(",", ":"))) < 15 * actions


def damaged(change: Any) -> str:
    data = json.loads(json.dumps(encode(recorded())))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps(encode(recorded()))[:-9], "no complete recording: it is not JSON"),
        ("[1, 2]", "no recording: its JSON does not say 'format'"),
        ('{"format": "another"}', "no recording: its JSON does not say 'format'"),
        (damaged(lambda d: d.update(version=0)), "version 0 of the format, and version 1 is read here"),
        (damaged(lambda d: d.pop("shape")), "damaged recording: KeyError: 'shape'"),
        (damaged(lambda d: d["shape"].update(layers=0)), "damaged recording: PlanError: layers=0"),
        (damaged(lambda d: d["shape"].update(depth=3)), "damaged recording: TypeError: .*'depth'"),
        (damaged(lambda d: d["spans"][0]["ns"].pop()), "damaged recording: ValueError: zip"),
        (damaged(lambda d: d["spans"][0].update(rank=2)), r"damaged recording: ValueError: 1A \+ 1F has 2 ranks, not"),
        (damaged(lambda d: d["tokens_per_expert"].pop()), "damaged recording: ValueError"),
        (damaged(lambda d: d["programs"].__setitem__(0, "X1")), "damaged recording: ValueError: 'X1' is no action"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "step-00000050.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=sentence) as failure:
        load(path)
    assert str(failure.value).startswith(str(path))
