"""Dense gradients summed in chunks under Lightning: the weights of a sum at the end, for any S_p and in any fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from cases import weights
from fits import Run, State, tiny_module
from lightning.pytorch.plugins import MixedPrecision
from pool import RankPool
from tiny import tiny

from lightning_afd import reduction
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import LocalJob
from lightning_afd.reduction import ChunkedSum
from lightning_afd.strategies.afd import AFDStrategy
from lightning_afd.strategies.tuning import NOTE, ChunkSize
from lightning_afd.tune import Tuning

ONE_BYTE, HUGE = 1, 2**40
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fit; `own` are options of AFDStrategy, `options` those of the Trainer."""

    chunk_bytes: int | Literal["auto"] | None
    run: Run = field(default_factory=lambda: Run(layout="2A+1F", precision="64-true"))
    steps: int = STEPS
    own: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False
    skips: bool = False
    """Whether one chunk of each step is left out."""
    save: Path | None = None
    resume: Path | None = None


class Save(pl.Callback):
    """Saves behind a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Save."""
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def trainer_of(case: Case) -> pl.Trainer:
    """The Trainer of a case."""
    callbacks = [] if case.save is None else [Save(case.save, case.steps - 3)]
    trainer = case.run.trainer(
        {**case.own, "reduce_chunk_bytes": case.chunk_bytes}, **{"callbacks": callbacks, **case.options}
    )
    assert isinstance(trainer.strategy, AFDStrategy)
    trainer.strategy.tuning = Tuning(samples=5, steps=2, least=64, most=2**20)
    if case.scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        trainer.strategy._precision_plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    return trainer


def fit(cases: Sequence[Case]) -> list[State]:
    """Weights of this rank at the end of each fit."""
    found = []
    for case in cases:
        module = tiny_module(steps=case.steps, layers=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reduction, "MOST_CHUNKS", 200)  # for the sake of time
            if case.skips:
                patch.setattr(ChunkedSum, "_start", skipping)
            trainer_of(case).fit(module, ckpt_path=case.resume)
        found.append(weights(module))
    return found


_right_start = ChunkedSum._start


def skipping(sums: ChunkedSum) -> int:
    """Leave the third chunk out, on all ranks."""
    sums._started += sums._started == 2
    return _right_start(sums)


def same(one: State, other: State) -> bool:
    """Whether all tensors are bit-equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


_WINDOWS = {"accumulate_grad_batches": 2}
FITS: dict[str, dict[str, Any]] = {
    "windows, clipping and a divided optimizer": {
        "options": {**_WINDOWS, "gradient_clip_val": 0.1},
        "own": {"optimizer_sharding": "torch"},
    },
    "windows under a loss scaler": {"scaled": True, "run": Run(layout="2A+1F"), "options": _WINDOWS},
    "bf16": {"run": Run(layout="2A+1F", precision="bf16-true")},
}


def test_weights_are_those_of_a_sum_at_the_end_bit_for_bit(pool: RankPool) -> None:
    """Of two attention ranks: a sum of two numbers does not depend on where the row is cut."""
    sizes = (None, ONE_BYTE, 4000, HUGE)
    plain = [Case(chunk_bytes=size) for size in sizes]
    others = [Case(chunk_bytes=size, **kind) for kind in FITS.values() for size in (None, 4000)]
    ranks = pool.run(fit, 3, plain + others, timeout=240)
    for rank in ranks:
        assert all(same(rank[0], other) for other in rank[1 : len(sizes)])
        for name, end, chunked in zip(FITS, rank[len(sizes) :: 2], rank[len(sizes) + 1 :: 2], strict=True):
            assert same(end, chunked), name
    assert all(same(one, other) for one, other in zip(ranks[0], ranks[1], strict=True))


def test_layouts_with_groups_and_heads_on_f_ranks(pool: RankPool) -> None:
    """Three attention ranks stay equal to each other; that they round like a sum at the end is not promised."""
    heads = Run(layout="2A+2F", precision="64-true")
    cases = [Case(chunk_bytes=size, run=heads, own={"head": "ffn"}) for size in (None, 1000)]
    for rank in pool.run(fit, 4, cases):
        assert same(*rank)
    three = Run(layout="3A+1F", precision="64-true")
    ranks = pool.run(fit, 4, [Case(chunk_bytes=size, run=three) for size in (None, 1000)])
    for end, chunked in ranks:
        assert all(torch.allclose(end[name], chunked[name], rtol=1e-12) for name in end)
    assert same(ranks[0][1], ranks[1][1]) and same(ranks[0][1], ranks[2][1])


def test_ranks_with_both_roles(pool: RankPool) -> None:
    run = Run(layout="2flowmoe", precision="64-true")
    for rank in pool.run(fit, 2, [Case(chunk_bytes=size, run=run) for size in (None, 1000)]):
        assert same(*rank)


def test_a_chunk_that_is_left_out_lets_ranks_go_apart(pool: RankPool) -> None:
    first, second, _ = pool.run(fit, 3, [Case(chunk_bytes=4000, skips=True)])
    assert not same(first[0], second[0])


# -- tuning -----------------------------------------------------------------------------------------------------------


STEPS_OF_A_SEARCH = 2 + 5 * (1 + 2) + 1
"""Warm-up, five samples of two steps and one before each, and the step behind whose predecessor all is known."""


@dataclass
class Found:
    """What a rank has at the end of a fit with tuning."""

    size: int | None
    """Chunk size of its sums; None on F ranks, too."""
    note: Any
    """What checkpoints have of it."""
    counted: int
    """Steps that were looked at."""
    weights: State


def tune(case: Case) -> Found:
    """Fit, as if steps took half of the time with chunks, and look at the chunk size."""
    module, seconds = tiny_module(steps=case.steps, layers=2), []
    count = ChunkSize._count

    def counting(size: ChunkSize, value: float) -> None:
        seconds.append(value)
        sums = size._engine.sums
        count(size, 1.0 if sums is not None and sums.chunk_bytes is None else 0.5)

    trainer = trainer_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkSize, "_count", counting)
        trainer.fit(module, ckpt_path=case.resume)
    assert isinstance(trainer.strategy, AFDStrategy) and all(value > 0 for value in seconds)
    sums = trainer.strategy.engine.sums if trainer.strategy.engine is not None else None
    note = trainer.strategy.checkpoint_notes.get(NOTE)
    return Found(None if sums is None else sums.chunk_bytes, note, len(seconds), weights(module))


def test_a_fit_tunes_over_its_first_steps_and_a_resumed_one_does_not(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "tuned"
    steps = STEPS_OF_A_SEARCH + 4
    ranks = pool.run(tune, 3, Case(chunk_bytes="auto", steps=steps, save=path), timeout=120)
    assert {rank.counted for rank in ranks} == {STEPS_OF_A_SEARCH - 1}
    assert ranks[0].note["bytes"] is not None and all(rank.note == ranks[0].note for rank in ranks)
    assert [rank.size for rank in ranks] == [ranks[0].note["bytes"]] * 2 + [None]
    (plain,) = zip(*pool.run(fit, 3, [Case(chunk_bytes=None, steps=steps)]), strict=True)
    assert all(same(rank.weights, other) for rank, other in zip(ranks, plain, strict=True))
    resumed = pool.run(tune, 3, Case(chunk_bytes="auto", steps=steps, resume=path))
    assert [rank.counted for rank in resumed] == [0, 0, 0]
    for before, after in zip(ranks, resumed, strict=True):
        assert (after.size, after.note) == (before.size, before.note) and same(after.weights, before.weights)


class Ranks:
    """Chunk sizes of the ranks of a job in this process, whose steps take as long as `seconds(rank, S_p)` says."""

    def __init__(self, seconds: Callable[[int, int | None], float], **tuning: Any) -> None:
        self.job = LocalJob(tiny(), Layout(attention=2, ffn=1))
        self.notes: list[dict[str, Any]] = [{}, {}, {}]
        self.tuning = Tuning(**{"least": 64, "most": 2**20, **tuning})
        self._seconds = seconds

    def fit(self, steps: int, wanted: Any = "auto") -> list[ChunkSize]:
        """Take so many steps."""
        engines = self.job.engines
        sizes = [
            ChunkSize(wanted, self.tuning, engines[rank], partial(self.notes.__getitem__, rank)) for rank in range(3)
        ]

        def play(rank: int) -> None:
            last = None
            for _ in range(steps):
                sizes[rank].next_step(last)
                last = self._seconds(rank, self.size(rank))

        self.job.network.run([partial(play, rank) for rank in range(3)])
        return sizes

    def size(self, rank: int) -> int | None:
        """The chunk size that an attention rank has now; F ranks follow the first one."""
        sums = self.job.engines[rank % 2].sums
        assert sums is not None
        return sums.chunk_bytes


def test_all_ranks_adopt_what_is_best_for_the_slowest_of_them() -> None:
    """The second attention rank is the slow one, and likes chunks of 1 KiB; the first one would like no chunks."""

    def seconds(rank: int, size: int | None) -> float:
        return (0.0 if size is None else 0.4) if rank == 0 else 1.0 if size is None else 0.5 + abs(size - 1024) / 1e4

    ranks = Ranks(seconds)
    first, *others = ranks.fit(100)
    assert first.tuned is not None and not first.searches and [other.tuned for other in others] == [None, None]
    assert ranks.size(0) == ranks.size(1) == first.tuned.chunk_bytes == ranks.notes[2][NOTE]["bytes"]
    assert 256 < first.tuned.fastest < 4096


def test_chunks_that_gain_nothing_are_not_adopted() -> None:
    ranks = Ranks(lambda rank, size: 1.0)
    (first, *_) = ranks.fit(100)
    assert first.tuned is not None and ranks.size(0) is ranks.size(1) is None
    assert ranks.notes[0][NOTE]["bytes"] is None


def test_what_was_tuned_is_kept_for_the_same_plan_only() -> None:
    ranks = Ranks(lambda rank, size: 1.0 if size is None else 0.5)
    ranks.fit(100)
    size = ranks.size(0)
    assert size is not None
    ranks.fit(1)
    assert ranks.size(0) == ranks.size(1) == size
    for note in ranks.notes:
        note[NOTE]["plan"] = "another one"
    assert ranks.fit(1)[0].searches and ranks.size(0) is None


@pytest.mark.parametrize(("wanted", "size"), [(None, None), (4096, 4096)])
def test_a_fixed_size_needs_no_search(wanted: int | None, size: int | None) -> None:
    ranks = Ranks(lambda rank, size: 1.0)
    assert not any(size.searches for size in ranks.fit(2, wanted))
    assert ranks.size(0) == ranks.size(1) == size


def test_too_few_gradients_are_not_cut() -> None:
    ranks = Ranks(lambda rank, size: 1.0, least=2**17)
    assert not any(size.searches for size in ranks.fit(2)) and ranks.size(0) is None
