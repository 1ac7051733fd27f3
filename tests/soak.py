"""Ends a job again and again, each time on another rank at another place, resumes it, and compares it with a quiet one.

A small job with a checkpoint after each step is started through Lightning's launcher. In each round one rank of it is
killed, raises or gets SIGTERM in some action of a step or amid a checkpoint; the next round goes on from
ckpt_path="last". The draw is seeded. At the end every loss, also of steps that were done twice, and all weights must be
those of the same job without a failure, bit for bit. `make soak ARGS='--rounds 4'`.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fits import Model, Run, tiny_module
from jobs import Ended, run_job
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemWriter

from lightning_afd.checkpoint import CheckpointReader
from lightning_afd.strategies.afd import AFDStrategy

REACH = 3
"""A rank is ended in one of the first `REACH` steps of its round."""
LOSSES, BOOM = "losses.txt", "soak"


@dataclass(frozen=True, kw_only=True)
class Blow:
    """What happens to one rank of a round."""

    rank: int
    how: str
    """One of kill, raise, term."""
    after: int
    """Steps of this round before it."""
    where: float
    """Share of the step's actions before it; from 1 on, within the checkpoint behind the step."""

    @classmethod
    def draw(cls, dice: random.Random, world: int) -> "Blow":
        """Any rank, any way, any action; one blow in five hits a checkpoint."""
        how = dice.choice(("kill", "raise", "term"))
        return cls(rank=dice.randrange(world), how=how, after=dice.randrange(REACH), where=dice.uniform(0.0, 1.25))

    def strike(self, place: str) -> None:
        """End this rank, or have it end."""
        sys.stderr.write(f"{BOOM}: rank {self.rank}, {self.how} in {place}\n")
        sys.stderr.flush()
        if self.how == "raise":
            raise LookupError(BOOM)
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGTERM)

    def is_answered(self, job: Ended) -> bool:
        """Whether the job said what it had to say at its end."""
        if self.how == "term":
            return "SIGTERM: saved" in job.output
        reason = f"failed first with LookupError: {BOOM}" if self.how == "raise" else "stopped without a word"
        if f"cannot be written, rank {self.rank}: LookupError: {BOOM}" in job.output:
            return True
        return any(
            line.partition("PeerFailure: ")[2].startswith(f"rank {self.rank} ") and reason in line
            for line in job.output.splitlines()
        )


class Handlers(Mapping[tuple[str, str], Any]):
    """A runtime's table, of which the action number `at` from now on strikes."""

    def __init__(self, handlers: Mapping[tuple[str, str], Any], at: int, blow: Blow) -> None:
        self._handlers, self._left, self._blow = handlers, at, blow

    def __getitem__(self, key: tuple[str, str]) -> Any:
        """The handler of the next action."""
        self._left -= 1
        if self._left == -1:
            self._blow.strike(f"a {''.join(key)} action")
        return self._handlers[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)


class Soak(pl.Callback):
    """Writes down the loss of each step, and strikes."""

    def __init__(self, folder: Path, blow: Blow | None) -> None:
        self._folder, self._blow, self._steps = folder, blow, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Arm this rank."""
        blow = self._blow
        if blow is not None and (trainer.global_rank, self._steps) == (blow.rank, blow.after):
            assert isinstance(trainer.strategy, AFDStrategy)
            assert trainer.strategy.engine is not None
            if blow.where < 1:
                self._arm(trainer.strategy.engine, blow)
            else:
                _arm_checkpoint(blow)
        self._steps += 1

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        """Every digit of the loss."""
        if trainer.is_global_zero:
            with (self._folder / LOSSES).open("a") as file:
                file.write(f"{trainer.global_step} {float(outputs['loss']).hex()}\n")

    def _arm(self, engine: Any, blow: Blow) -> None:
        at = int(blow.where * len(engine.program(engine.plan.micro_batches, training=True)))
        tables = engine.runtime._tables
        engine.runtime._tables = {**tables, engine.worker: Handlers(tables[engine.worker], at, blow)}


def _arm_checkpoint(blow: Blow) -> None:
    """Strike once this rank's part of the next checkpoint is written."""
    write = FileSystemWriter.write_data

    def write_data(self: FileSystemWriter, *args: Any) -> Any:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
        written = write(self, *args)
        blow.strike("a checkpoint")
        return written

    FileSystemWriter.write_data = write_data  # type: ignore[method-assign, assignment]


def train(layout: str, folder: Path, steps: int, blow: Blow | None) -> None:
    """On every rank of a round: all steps that are left, if nothing happens."""
    torch.manual_seed(0)
    module: Model = tiny_module(steps=steps, dropout=0.2)
    module.optimizer = torch.optim.AdamW
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=1, save_last=True)
    trainer = Run(layout=layout).trainer(enable_checkpointing=True, callbacks=[Soak(folder, blow), saver])
    trainer.fit(module, ckpt_path="last")


class Soaking:
    """The job in which nothing happens, and the one that ends again and again."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self.faults: list[str] = []

    def run(self) -> None:
        """All rounds; each one prints a line."""
        rounds, world = self._options.rounds, Run(layout=self._options.layout).world
        self._round("quiet", "quiet", None)
        if self.faults:  # nothing to compare with
            return
        dice = random.Random(self._options.seed)
        for number in range(1, rounds + 1):
            self._round(f"round {number} of {rounds}", "soaked", Blow.draw(dice, world))
        self._round("to the end", "soaked", None)
        self._compare()

    def _round(self, name: str, folder: str, blow: Blow | None) -> None:
        start, path = time.perf_counter(), self._folder / folder
        path.mkdir(exist_ok=True)
        options = {"layout": self._options.layout, "folder": str(path), "steps": REACH * (self._options.rounds + 1)}
        told = json.dumps({**options, "blow": None if blow is None else asdict(blow)})
        job = run_job([__file__, "--job", told], seconds=self._options.seconds)
        happened = next((line for line in job.output.splitlines() if line.startswith(f"{BOOM}: ")), "")
        faults = _faults(job, blow, happened)
        said = f"{name}: {happened.removeprefix(f'{BOOM}: ') or 'nothing happens'}; "
        said += f"ended after {time.perf_counter() - start:.0f} s with {job.code}, {self._steps(folder)} steps are done"
        sys.stdout.write("; ".join([said, *faults]) + "\n" + (job.output if faults else ""))
        sys.stdout.flush()
        self.faults += faults

    def _steps(self, folder: str) -> int:
        return max((step for step, _ in self._losses(folder)), default=0)

    def _losses(self, folder: str) -> set[tuple[int, str]]:
        """Step and loss; a step that was done twice with two losses is there twice."""
        path = self._folder / folder / LOSSES
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return {(int(step), loss) for step, loss in map(str.split, lines)}

    def _compare(self) -> None:
        """With the job that nothing happened to."""
        quiet, soaked = self._losses("quiet"), self._losses("soaked")
        if len(quiet) != REACH * (self._options.rounds + 1) or quiet != soaked:
            self.faults.append(f"losses differ: {sorted(quiet ^ soaked)} of {len(quiet)}")
            return
        ours, theirs = (CheckpointReader(str(self._folder / name / "last.ckpt")) for name in ("soaked", "quiet"))
        wanted = dict.fromkeys(theirs.names())
        got, want = ours.read(wanted), theirs.read(wanted)
        self.faults += [f"{name} differs" for name in wanted if not torch.equal(got[name], want[name])]


def _faults(job: Ended, blow: Blow | None, happened: str) -> list[str]:
    """What is wrong with the end of a job."""
    checks = {
        "it did not end in time": job.in_time,
        f"{len(job.left)} processes were left": not job.left,
        "nothing happened": blow is None or bool(happened),
        "it failed": job.code == 0 or (blow is not None and blow.how != "term"),
        "it ended with success": job.code != 0 or blow is None or blow.how == "term",  # as Lightning ends on SIGTERM
        "it did not say why": blow is None or blow.is_answered(job),
    }
    return [fault for fault, is_well in checks.items() if not is_well]


def main() -> int:
    """The exit code: 0 where all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layout", default="2A+2F")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="bound of each job, of which one does all steps")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        blow = options.job.pop("blow")
        folder = Path(options.job.pop("folder"))
        train(**options.job, folder=folder, blow=None if blow is None else Blow(**blow))
        return 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as path:
        soaking = Soaking(options, Path(path))
        soaking.run()
    verdict = "; ".join(soaking.faults) or "losses and weights are those of the quiet job, bit for bit"
    sys.stdout.write(
        f"soak: {options.rounds} rounds of {options.layout} in {time.perf_counter() - start:.0f} s: {verdict}\n"
    )
    return 1 if soaking.faults else 0


if __name__ == "__main__":
    sys.exit(main())
