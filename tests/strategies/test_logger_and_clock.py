"""TensorBoard is written by rank 0 alone; `max_time` ends all ranks behind one step, whatever their clocks say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import join, weights
from fits import Run, State, tiny_module, worst
from lightning.pytorch.callbacks import timer
from lightning.pytorch.loggers import TensorBoardLogger
from pool import RankPool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_afd.callbacks import ExpertLoad

RUN, REF = Run(layout="2A+1F"), Run(layout="ref")
LIMIT = 30
"""Seconds; a step of rank 0 takes ten."""


def _clock_of(trainer: Any) -> SimpleNamespace:
    """That of rank 1 is far ahead, that of rank 2 stands still."""
    seconds = (10.0, 1e6, 0.0)[trainer.global_rank]
    return SimpleNamespace(monotonic=lambda: seconds * trainer.global_step)


def fit(run: Run, folder: Path) -> tuple[int, State, list[str]]:
    """Up to 8 steps with TensorBoard; returns those done, the weights and the writers of this rank."""
    module, logger = tiny_module(steps=8, layers=2), TensorBoardLogger(folder, name="", version=run.layout)
    callbacks = [ExpertLoad(every_n_steps=2)]
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "callbacks": callbacks}
    trainer = run.trainer(max_time={"seconds": LIMIT}, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "time", _clock_of(trainer))
        trainer.fit(module)
    return trainer.global_step, weights(module), [type(logger.experiment).__name__]


def test_one_writer_and_one_end(pool: RankPool, tmp_path: Path) -> None:
    steps, whole, _ = pool.run(fit, 1, REF, tmp_path)[0]
    ranks = pool.run(fit, RUN.world, RUN, tmp_path)
    assert [rank[0] for rank in ranks] == [steps] * 3 == [3] * 3
    assert worst(join([rank[1] for rank in ranks]), whole)[0] <= 1e-5
    assert [rank[2] for rank in ranks] == [["SummaryWriter"], ["_DummyExperiment"], ["_DummyExperiment"]]
    assert len(list((tmp_path / RUN.layout).glob("events.*"))) == 1
    ours, theirs = (EventAccumulator(str(tmp_path / run.layout)).Reload() for run in (RUN, REF))
    for loss, reference in zip(ours.Scalars("train_loss"), theirs.Scalars("train_loss"), strict=True):
        assert loss.step == reference.step and loss.value == pytest.approx(reference.value, rel=1e-5)
    (histogram,) = ours.Histograms("moe/layer1/tokens")
    assert histogram.step == 2
    assert histogram.histogram_value.sum == sum(b["input_ids"].numel() for b in tiny_module(steps=2).batches[1:]) * 2
    assert theirs.Tags()["histograms"] == []
