"""Steps that are recorded: which, where, and that nothing else about the run changes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from cases import weights
from fits import Memory, Run, tiny_module
from pool import RankPool
from recorded import recorded
from torch import Tensor

from lightning_afd import AFDStrategy
from lightning_afd.callbacks import StepMonitor
from lightning_afd.model.place import dense_parameters
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.recording import NicTraffic, Recording, load, recordings_in
from lightning_afd.report import PANELS, write_report
from lightning_afd.strategies import tracing
from lightning_afd.strategies.tracing import FIGURES, mean_shares
from lightning_afd.timeline import LANES
from lightning_afd.waits import usage_of, waits_of

ROWS, LENGTH, BATCHES = 8, 8, 8
TOP_K = 2
Line = tuple[int, dict[str, float]]


@dataclass(frozen=True)
class Fit:
    """What one rank brings back from two batches per optimizer step."""

    weights: dict[str, Tensor]
    lines: list[Line]
    """What its logger got."""
    figures: dict[str, float]
    dense_bytes: int
    counts: bool
    """Whether experts are counted after the run."""
    readings: int
    """How often the counters of NICs were read."""


def fit(run: Run, folder: Path, trace: int) -> Fit:
    """Four optimizer steps."""
    module, memory = tiny_module(steps=BATCHES, rows=ROWS), Memory()
    trainer = run.trainer(
        {"trace": trace, "trace_dir": str(folder / "trace")},
        callbacks=[StepMonitor()],
        logger=memory,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
    )
    readings = count(1)
    with patch.object(tracing, "counters", lambda: {"eth0": (100 * next(readings), 7), "eth1": (3, 3)}):
        trainer.fit(module)
    strategy = trainer.strategy
    assert isinstance(strategy, AFDStrategy) and strategy.engine is not None
    counts = strategy.engine.expert_counts
    figures = {name: float(value) for name, value in trainer.callback_metrics.items() if name in FIGURES}
    dense = sum(parameter.nbytes for parameter in dense_parameters(module))
    return Fit(weights(module), memory.lines, figures, dense, counts.enabled or counts.recording, next(readings) - 1)


@pytest.mark.parametrize(
    "run",
    [Run(), Run(layout="1A+1F", groups=2), Run(layout="2flowmoe")],
    ids=["2A+2F", "2 x (1A+1F)", "2 collocated"],
)
def test_recorded_steps_of_a_run(pool: RankPool, tmp_path: Path, run: Run) -> None:
    plain = pool.run(fit, run.world, run, tmp_path / "plain", 0)
    ranks = pool.run(fit, run.world, run, tmp_path, 2)
    assert not (tmp_path / "plain").exists()
    for rank, before in zip(ranks, plain, strict=True):
        assert all(rank.weights[name].equal(value) for name, value in before.weights.items())
        assert not rank.counts
        assert rank.lines == ranks[0].lines and rank.figures == ranks[0].figures
    assert [rank.readings for rank in ranks] == [2 * 2, *[0] * (run.world - 1)] and plain[0].readings == 0
    recordings = [load(path) for path in recordings_in(tmp_path)]
    assert [recording.global_step for recording in recordings] == [2, 4]
    for recording in recordings:
        check_recording(recording, run, [rank.dense_bytes for rank in ranks])
    logged = {step: line for step, line in ranks[0].lines if "bubble" in line}
    assert logged == {
        recording.global_step: dict(zip(FIGURES, mean_shares(recording), strict=True)) for recording in recordings
    }
    assert ranks[0].figures == pytest.approx(logged[4])
    page = write_report(tmp_path).read_text()
    assert all(f'<section id="{panel.key}"' in page for panel in PANELS) and "2 recorded steps (2, 4)" in page


def check_recording(recording: Recording, run: Run, dense_bytes: list[int]) -> None:
    """All parts of one recording."""
    timeline, shape = recording.timeline, recording.shape
    programs = recording.schedule().programs
    layout = timeline.layout
    assert layout.world == run.world and timeline.by_rank.keys() == set(range(run.world))
    for rank, spans in timeline.by_rank.items():
        for worker in layout.workers_of(rank):
            assert tuple(s.action for s in spans if timeline.worker(s) == worker) == programs[worker]
        times = [time for span in spans for time in (span.start, span.end)]
        assert times == sorted(times)
    assert timeline.start == 0 < timeline.seconds < recording.seconds * 10
    for usage in usage_of(timeline, waits_of(timeline, shape)).values():
        assert usage.step == pytest.approx(timeline.seconds)
        assert min(usage.seconds().values()) > -1e-9
    for rank in (rank for rank in range(run.world) if layout.worker_of(rank).role == "A"):
        chunks = [reduce for reduce in timeline.reduces if reduce.rank == rank]
        assert sum(chunk.nbytes for chunk in chunks[1:]) == dense_bytes[rank] > 0
        assert min(chunk.start for chunk in chunks) >= timeline.by_rank[rank][-1].end
        lanes = {timeline.lane(span) for span in timeline.by_rank[rank]}
        assert lanes | {"reduce"} == set(LANES)
    assert recording.tokens == ROWS * LENGTH
    assert [sum(layer) for layer in recording.tokens_per_expert] == [ROWS * LENGTH * TOP_K] * shape.layers
    sent = {(t.sender, t.receiver, t.channel): t for t in recording.traffic}
    attention, ffn = run.sizes
    others = attention * ffn - (run.world if layout.collocated else 0)  # what a rank sends to itself is no message
    assert sum(t.messages for t in sent.values() if t.channel == "Cf") == shape.layers * 2 * others
    assert all(t.nbytes > 0 for t in sent.values())
    assert (recording.versions.experts, recording.versions.transport) == ("loop", "gloo")
    assert [(clock.host, clock.offset, clock.accuracy) for clock in recording.clocks] == [(0, 0, 0)] * run.world
    assert recording.nics == (NicTraffic(0, "eth0", 100, 0),)
    assert recording.loss > 0


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tracing, "rank_zero_warn", said.append)
    (tmp_path / "trace").write_text("a file")
    tracing._write(recorded(), tmp_path / "trace")
    assert len(said) == 1 and "step 50 could not be recorded in" in said[0] and "training goes on" in said[0]


@pytest.mark.parametrize(
    ("chosen", "log_dir", "folder"),
    [("auto", "logs/version_3", "logs/version_3/trace"), ("auto", None, "root/trace"), ("here", "logs", "here")],
)
def test_recordings_are_beside_the_log_unless_a_folder_is_chosen(chosen: str, log_dir: str | None, folder: str) -> None:
    strategy = AFDStrategy(trace=1, trace_dir=chosen)
    trainer = SimpleNamespace(log_dir=log_dir, default_root_dir="root")
    strategy._lightning_module = SimpleNamespace(trainer=trainer)  # type: ignore[assignment]
    assert strategy._trace_folder() == Path(folder)


def test_bad_option_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="trace=-1: choose 0"):
        AFDStrategy(trace=-1)
