"""What the panels say is what the recordings hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recorded import recorded, spans
from reports import BYTES, run_folder, run_of, step_of

from lightning_afd.errors import RecordingError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.placement import Layout
from lightning_afd.recording import NicTraffic, RankClock, Recording, Traffic, save
from lightning_afd.regime import regime_of
from lightning_afd.report.charts import LEVELS, level_of
from lightning_afd.report.experts import expert_map, experts, rank_map, spread_text
from lightning_afd.report.progress import drift_text, loss_curves, losses, step_rows
from lightning_afd.report.run import MOST, read_metrics, read_run
from lightning_afd.report.shares import share_row, usages, wait_rows, waits
from lightning_afd.report.summary import summary, summary_rows
from lightning_afd.report.traffic import channel_rows, host_rows, link_bytes, nic_rows, traffic
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Timeline
from lightning_afd.waits import waits_by_message

ONE = Shape(layers=1, micro_batches=1)
A_RANK = "A0f0 0-2, D0f0 2-2, C0f0 2-7, A1f0 7-8, A1b0 8-9, D0b0 9-9, C0b0 9-9, A0b0 9-10"
F_RANK = "D0f0 0-3, E0f0 3-6, C0f0 6-6, D0b0 6-9, C0b0 9-9"


def by_hand(**changes: object) -> Recording:
    """One A rank and one F rank: F waits 2 s for A and 1 s for the network, A 4 s for F and 1 s for the network."""
    timeline = Timeline(Layout(attention=1, ffn=1), tuple(spans(A_RANK) + spans(F_RANK, 1)))
    return recorded(timeline, ONE, **{"seconds": 10.0, "tokens": 40, **changes})


def test_summary_has_the_figures_of_the_chosen_step() -> None:
    run = run_of(by_hand(global_step=7, loss=1.25), by_hand(global_step=9, loss=0.5), model="qwen3_moe")
    rows = dict(summary_rows(run, regime_of(run.chosen.timeline, run.usage)))
    assert rows["Tokens per second"] == "4"
    assert rows["Forward and backward"] == "10.0 s for 40 tokens, loss 0.5000"
    assert rows["Bound by"] == "attention"
    assert rows["Layout"] == "1A + 1F: 2 ranks on 1 host"
    assert rows["Order"] == "af-pipe, 1 micro-batch per attention rank and step"
    assert rows["Model"] == "qwen3_moe, 1 MoE layer of 3 experts"
    assert rows["Versions"] == "lightning-afd 0, torch 2, expert map 3"
    assert rows["Shown in detail"] == "step 9 of 2 recorded steps (7, 9)"
    assert "give attention more of the ranks" in summary(run)


def test_summary_says_how_well_clocks_agree() -> None:
    clocks = (RankClock(), RankClock(host=1, accuracy=2e-5, source="cuda events"))
    run = run_of(by_hand(clocks=clocks))
    rows = dict(summary_rows(run, regime_of(run.chosen.timeline, run.usage)))
    assert rows["Clocks"] == "cuda events, perf_counter; ranks agree to 20 us"
    assert rows["Layout"].endswith("on 2 hosts")


def test_shares_of_each_rank_fill_its_bar() -> None:
    run = run_of(by_hand())
    found = usages(run)
    assert list(found) == ["rank 0 (A0)", "rank 1 (F0)"]
    name, bar, *figures = share_row("rank 1 (F0)", found["rank 1 (F0)"])
    assert (name, figures) == ("rank 1 (F0)", ["30.0%", "60.0%", "10.0%"])
    widths = {
        kind: float(width) for width, kind in re.findall(r'width="([\d.]+)%" height="16" class="part (\w+)"', bar)
    }
    assert widths == {"compute": 30.0, "wait_for_A": 50.0, "wait_for_net": 10.0, "bubble": 10.0}


def test_shares_name_the_average_of_several_ranks() -> None:
    layout = Layout(attention=2, ffn=1)
    busy, idle = spans("A0f0 0-4"), spans("A0f0 0-2", 1)
    run = run_of(recorded(Timeline(layout, (*busy, *idle)), ONE, traffic=()))
    found = usages(run)
    assert list(found) == ["A0, mean of 2", "rank 0 (A0)", "rank 1 (A0)"]
    assert found["A0, mean of 2"].shares()["busy"] == 0.75


def test_waits_by_message_and_stage() -> None:
    run = run_of(by_hand())
    rows = {row[0]: row[1:] for row in wait_rows(waits_by_message(run.all_waits))}
    none, second = ["–"] * 3, ["1.00 s"] * 3
    assert rows["Df"] == ["1", *["2.00 s"] * 3, *second, *none, "3.00 s"]
    assert rows["Cf"] == ["1", *none, *second, *["4.00 s"] * 3, "5.00 s"]
    page = waits(run)
    assert "dispatch forward (Df)" in page and "experts of layer 0 (E0)" in page and "attention segment 1 (A1)" in page
    assert "Over 1 recorded step of" in page


def test_waits_of_another_schedule_are_left_out() -> None:
    other = step_of(Shape(layers=2, micro_batches=3))
    alone, both = run_of(by_hand()), run_of(other, by_hand())
    assert both.all_waits == alone.all_waits
    assert len(run_of(by_hand(), by_hand()).all_waits) == 2 * len(alone.all_waits)


def test_a_step_without_a_sender_is_named() -> None:
    alone = recorded(Timeline(Layout(attention=1, ffn=1), tuple(spans(A_RANK))), ONE, global_step=70)
    with pytest.raises(RecordingError, match="the recording of step 70 is damaged: rank 0 waits in C0f0"):
        waits(run_of(alone))


def test_long_steps_are_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_afd.report.run.POOLED_ACTIONS", 30)
    assert len(run_of(by_hand(), by_hand()).pooled) == 2
    monkeypatch.setattr("lightning_afd.report.run.POOLED_ACTIONS", 20)
    assert run_of(by_hand(loss=1.0), by_hand(loss=2.0)).pooled[0].loss == 2.0


def test_bytes_by_link_and_channel() -> None:
    recording = step_of(Shape(layers=2, micro_batches=3))
    assert link_bytes(recording) == {
        ("0 (A0)", "1 (F0)"): 6 * (BYTES["Df"] + BYTES["Db"]),
        ("1 (F0)", "0 (A0)"): 6 * (BYTES["Cf"] + BYTES["Cb"]),
    }
    assert ["dispatch forward (Df)", "A → F", "6", "2.40 MB", "400 kB"] in channel_rows(recording)
    assert "nothing passed a NIC" in traffic(run_of(recording))


def test_bytes_of_many_ranks_are_those_of_workers() -> None:
    layout = Layout(attention=9, ffn=8)
    sent = (Traffic(0, 9, "Df", 1, 10), Traffic(8, 16, "Df", 1, 5), Traffic(16, 8, "Cf", 1, 7))
    recording = recorded(Timeline(layout, tuple(spans("A0f0 0-1"))), ONE, traffic=sent)
    assert link_bytes(recording) == {("A0", "F0"): 15, ("F0", "A0"): 7}


def test_bytes_that_pass_nics() -> None:
    layout = Layout(attention=2, ffn=1)
    sent = (Traffic(0, 1, "Hf", 1, 1000), Traffic(0, 2, "Df", 1, 20_000), Traffic(2, 1, "Cf", 1, 300))
    hosts = tuple(RankClock(host=host) for host in (0, 0, 2))
    recording = recorded(Timeline(layout, tuple(spans("A0f0 0-1"))), ONE, traffic=sent, clocks=hosts)
    assert host_rows(recording) == [["host of rank 0", "20.0 kB", "300 B"], ["host of rank 2", "300 B", "20.0 kB"]]
    assert host_rows(by_hand()) == []


def test_bytes_that_hosts_have_counted() -> None:
    counted = (NicTraffic(0, "eth0", 25_000, 400), NicTraffic(0, "mlx5_<0>", 1, 0), NicTraffic(1, "eth0", 390, 24_000))
    hosts = (RankClock(), RankClock(host=1))
    recording = by_hand(nics=counted, clocks=hosts, traffic=(Traffic(0, 1, "Df", 1, 20_000),))
    assert nic_rows(recording) == [
        ["host of rank 0: eth0", "25.0 kB", "400 B"],
        ["host of rank 0: mlx5_&lt;0&gt;", "1 B", "0 B"],
        ["host of rank 1: eth0", "390 B", "24.0 kB"],
        ["host of rank 0: messages of the schedule", "20.0 kB", "0 B"],
        ["host of rank 1: messages of the schedule", "0 B", "20.0 kB"],
    ]
    assert "all processes" in traffic(run_of(recording)) and "eth0" in traffic(run_of(recording))
    assert "eth0" not in traffic(run_of(by_hand(nics=counted[:2])))  # all ranks share the host


def test_tokens_stand_by_expert_and_f_rank() -> None:
    layout = Layout(attention=1, ffn=2)
    timeline = Timeline(layout, tuple(spans("A0f0 0-1")))
    maps = (ExpertMap((1, 0, 1, 0)),)
    recording = recorded(timeline, ONE, expert_maps=maps, tokens_per_expert=((5, 20, 15, 0),), traffic=())
    data = expert_map(recording)
    assert (data.column_names, data.rows, data.borders) == (("1", "3", "0", "2"), ((20, 0, 5, 15),), (2,))
    assert data.levels() == [[7, 0, 3, 5]]
    assert rank_map(recording).rows == ((20, 20),)
    assert spread_text(recording) == (
        "Busiest expert of any layer: 2.00 times its layer's mean; busiest F rank: 1.00 times; "
        "1 expert without a token."
    )
    assert experts(run_of(recording)).count("<path") == 4 + 1 + 1  # shades of experts, their border, one of ranks


def test_shades_grow_with_the_load() -> None:
    shades = [level_of(value, 1.0) for value in (0, 0.01, *LEVELS)]
    assert shades == [0, 1, *range(2, 2 + len(LEVELS))]
    assert level_of(0, 0.0) == 0


def test_losses_are_the_loggers_or_the_recorded_ones(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path))
    assert loss_curves(run) == {"train_loss": ((9, 2.5), (19, 2.25)), "val_loss": ((19, 2.75),)}
    assert run.metrics["lr-AdamW"] == ((9, 0.001), (19, 0.002), (29, 0.003))
    assert "Learning rate" in losses(run) and losses(run).count("<polyline") == 3
    without = run_of(by_hand(global_step=4, loss=2.0), by_hand(global_step=8, loss=float("nan")))
    assert loss_curves(without) == {"loss of the recorded steps": ((4, 2.0),)}
    assert "No finite value" in losses(run_of(by_hand(loss=float("inf"))))


def test_mean_over_epochs_stands_for_no_second_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train_loss_step,train_loss_epoch,other_loss_epoch\n1,3,,\n2,,3.5,4\n")
    run = run_of(by_hand(), metrics=read_metrics(path))
    assert sorted(loss_curves(run)) == ["other_loss_epoch", "train_loss_step"]


def test_drift_compares_recorded_steps_with_the_first() -> None:
    run = run_of(by_hand(global_step=5), by_hand(global_step=10, seconds=12.5))
    assert step_rows(run) == [
        ["5", "10.0 s", "4", "+0.0%", "1.5000"],
        ["10", "12.5 s", "3", "+25.0%", "1.5000"],
    ]
    assert drift_text(run).startswith("Step 10 took 25.0% more time than step 5;")
    assert "Only one step" in drift_text(run_of(by_hand()))


def test_a_run_is_read_as_its_folder_has_it(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path))
    assert (run.chosen.global_step, run.recorded, run.model) == (20, 3, "qwen3_moe")
    assert read_run(tmp_path, step=30).chosen.seconds == pytest.approx(0.3)
    assert read_run(tmp_path / "logs").chosen.global_step == 20


def test_many_recordings_are_read_from_first_to_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_afd.report.run.MOST", 3)
    run = read_run(run_folder(tmp_path, tuple(range(1, 9))))
    assert [one.global_step for one in run.recordings] == [1, 5, 8]
    assert run.recorded == 8 and MOST > 3
    assert "8 recorded steps (1, 5, 8), 3 of them read" in summary(run)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "logs/metrics.csv",
            "a,b\n1,2\n",
            "metrics.csv is no file of Lightning's CSVLogger: its first line has no column",
        ),
        ("logs/metrics.csv", "", "metrics.csv is no file of Lightning's CSVLogger: its first line has no column"),
        ("logs/metrics.csv", "step,train_loss\n1,2\n2,high\n", "metrics.csv is no .*: line 3 has 'high' for a number"),
        ("logs/metrics.csv", "step,loss\n1," + "x" * 200_000, "metrics.csv is no .*: field larger than field limit"),
        ("config.yaml", "model: [1\n", "config.yaml cannot be read as settings: "),
        ("logs/trace/step-00000010.json", "{", "step-00000010.json is no complete recording"),
        ("logs/trace/step-00000010.json", '{"format": "other"}', "step-00000010.json is no recording"),
    ],
)
def test_files_that_are_something_else_are_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    path = run_folder(tmp_path) / file
    path.write_text(content)
    with pytest.raises(RecordingError, match=message):
        read_run(tmp_path)


def test_a_step_in_which_nothing_happened_is_named(tmp_path: Path) -> None:
    save(by_hand(seconds=0.0), tmp_path / "trace")
    with pytest.raises(
        RecordingError, match=r"step-00000050.json is a damaged recording: nothing happened in 0 seconds"
    ):
        read_run(tmp_path)


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"no recorded steps .*AFDStrategy\(trace=50\), or strategy.trace=50"):
        read_run(tmp_path)
    with pytest.raises(RecordingError, match=r"run=.*nowhere is no folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match="step=11 is not recorded; there are 10, 20, 30"):
        read_run(run_folder(tmp_path), step=11)
