"""Whatever ends one rank ends the job, with the first cause last; a signal to one rank stops all of them in order."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cases import weights
from fits import Model, Run, tiny_module
from jobs import run_job
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from pool import RankPool, RemoteError

from lightning_afd.transport.p2p import ProcessGroups

SCRIPT = Path(__file__).parent.parent / "failing_script.py"


@pytest.mark.parametrize(
    ("ranks", "how", "first", "parts"),
    [
        (
            2,
            "raises",
            "rank 1 failed first with ValueError: boom",
            ("rank 1 (F0) failed in E1f0: layer 1, micro-batch 0",),
        ),
        (4, "exits", "rank 3 (F0) [exit code 9] stopped without a word", ("while waiting for C1f0",)),
        (2, "hangs", "rank 1 (F0) does not get ahead", ("it is in E1f0: layer 1, micro-batch 0", "rank 0 (A0)")),
    ],
)
def test_the_first_cause_is_the_last_thing_said(ranks: int, how: str, first: str, parts: tuple[str, ...]) -> None:
    job = run_job([str(SCRIPT), str(ranks), how])
    assert job.code not in (0, -signal.SIGKILL), job.output
    last = job.output[job.output.rindex("PeerFailure") :]
    assert last.startswith(f"PeerFailure: {first}"), job.output
    assert all(part in last for part in parts), job.output
    assert job.in_time, job.output
    assert not job.left, job.output


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [("early-raises", 1, "ValueError: boom"), ("early-exits", 9, "local rank 0 (process")],
)
def test_ranks_that_wait_for_one_that_has_failed_end_with_it(how: str, code: int, last: str) -> None:
    """Nothing connects them yet: rank 0 ends those that it has started, or they notice that it has ended."""
    job = run_job([str(SCRIPT), "2", how])
    assert job.code == code, job.output
    assert job.output.rstrip().splitlines()[-1].startswith(last), job.output
    assert job.in_time, job.output
    assert not job.left, job.output


class Signalled(pl.Callback):
    """One rank gets a signal in the first batch of the second accumulation window."""

    def __init__(self, rank: int, action: Any) -> None:
        self._rank, self._action = rank, action

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """As it would come from outside."""
        if trainer.global_rank == self._rank and batch_idx == 2:
            self._action(trainer)


def _terminate(trainer: pl.Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _module() -> Model:
    module = tiny_module(steps=6)
    module.optimizer = torch.optim.AdamW
    return module


def fit(module: Model, layout: str, ckpt_path: str | None = None, **options: Any) -> None:
    """On a rank of the pool."""
    Run(layout=layout).trainer(**options).fit(module, ckpt_path=ckpt_path)


def _options(folder: str, **options: Any) -> dict[str, Any]:
    saver = ModelCheckpoint(dirpath=folder, save_top_k=0, save_last=False)
    return {"accumulate_grad_batches": 2, "enable_checkpointing": True, "callbacks": [saver], **options}


def _stopped_and_resumed(folder: str, rank: int) -> tuple[int, bool]:
    """Global step at which SIGTERM to one rank stopped this one, and whether the resumed fit ends as a whole one."""
    whole = _module()
    fit(whole, "2A+2F", accumulate_grad_batches=2)
    options = _options(folder)
    options["callbacks"].append(Signalled(rank, _terminate))
    stopped = _module()
    with pytest.raises(pl.utilities.exceptions.SIGTERMException):
        fit(stopped, "2A+2F", **options)
    step = stopped.trainer.global_step
    resumed = _module()
    fit(resumed, "2A+2F", ckpt_path="last", **_options(folder))
    want, got = weights(whole), weights(resumed)
    return step, all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("rank", [0, 3])
def test_sigterm_to_one_rank_stops_all_behind_the_step_with_a_checkpoint(
    pool: RankPool, tmp_path: Path, rank: int
) -> None:
    assert pool.run(_stopped_and_resumed, 4, str(tmp_path), rank) == [(2, True)] * 4


def _requeued(folder: str) -> tuple[int, list[Any]]:
    """A fit in which rank 3 alone gets SLURM's signal; returns its last step and the commands that were run."""
    commands: list[Any] = []
    os.environ["SLURM_JOB_ID"] = "7"
    signal_connector.call = lambda command, **_: commands.append(command) or 0
    notice = Signalled(3, lambda trainer: trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None))
    module = _module()
    fit(module, "2A+2F", callbacks=[notice], default_root_dir=folder)
    return module.trainer.global_step, commands


def test_slurms_signal_to_one_rank_saves_on_all_and_requeues_once(pool: RankPool, tmp_path: Path) -> None:
    command = ["scontrol", "requeue", "7"]
    assert pool.run(_requeued, 4, str(tmp_path)) == [(6, [command]), (6, []), (6, []), (6, [])]
    assert (tmp_path / "hpc_ckpt_1.ckpt" / "meta.pt").is_file()


class _Exception(pl.Callback):
    """A callback that saves when the fit fails, as OnExceptionCheckpoint does."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Called on this rank only, where the failure is this rank's own."""
        trainer.save_checkpoint(Path(self._folder, "broken.ckpt"))


def _fails_alone(folder: str) -> None:
    module = _module()

    def boom(trainer: pl.Trainer) -> None:
        raise LookupError("boom")

    fit(module, "1A+1F", callbacks=[Signalled(1, boom), _Exception(folder)])


@pytest.mark.filterwarnings("ignore:no checkpoint is written")
def test_saving_on_an_exception_of_one_rank_does_not_hang(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.try_run(_fails_alone, 2, str(tmp_path))
    assert all(isinstance(error, RemoteError) for error in errors)
    assert [error.type_name for error in errors] == ["PeerFailure", "LookupError"]
    assert not (tmp_path / "broken.ckpt").exists()


def _fails_while_connecting() -> None:
    """Rank 1 alone: the groups exist, but not all of their connections."""
    warm = ProcessGroups.warm

    def broken(groups: ProcessGroups, device: torch.device) -> None:
        if dist.get_rank() == 1:
            raise LookupError("boom")
        warm(groups, device)

    ProcessGroups.warm = broken  # type: ignore[method-assign]
    try:
        fit(_module(), "1A+1F")
    finally:
        ProcessGroups.warm = warm  # type: ignore[method-assign]


def test_a_failure_in_the_middle_of_set_up_is_told(pool: RankPool) -> None:
    errors = pool.try_run(_fails_while_connecting, 2)
    assert all(isinstance(error, RemoteError) for error in errors)
    assert [error.type_name for error in errors] == ["PeerFailure", "LookupError"]
    assert "rank 1 failed first with LookupError: boom" in str(errors[0])


def _leaves_alone() -> None:
    fit(_module(), "1A+1F", callbacks=[Signalled(1, lambda trainer: sys.exit(3))])


def test_a_rank_that_leaves_is_the_first_cause(pool: RankPool) -> None:
    error, _ = pool.try_run(_leaves_alone, 2)
    assert isinstance(error, RemoteError)
    assert "rank 1 failed first with SystemExit: 3" in str(error)
