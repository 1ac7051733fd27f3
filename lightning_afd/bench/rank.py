"""One rank of a run: `python -m lightning_afd.bench.rank <settings.json>`, with the variables of torchrun."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from lightning_afd.bench.balance import balance
from lightning_afd.bench.compare import Comparison, Effort
from lightning_afd.bench.docs import write_docs
from lightning_afd.bench.job import Arena, Job
from lightning_afd.bench.machine import machine
from lightning_afd.bench.picture import draw
from lightning_afd.bench.registry import available
from lightning_afd.bench.result import Result, Section
from lightning_afd.bench.settings import BALANCED, Settings
from lightning_afd.bench.start import CORE, ask_for_rate
from lightning_afd.bench.tables import tables
from lightning_afd.bench.workload import Workload
from lightning_afd.errors import AFDError

AS_IT_IS = "the network as it is"
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run; an error of the settings is one sentence and exit code 1."""
    _settle_down()
    settings = Settings.read(json.loads(Path(sys.argv[1]).read_text()))
    try:
        result = run(settings)
    except AFDError as error:
        sys.stderr.write(f"lightning-afd: {error}\n")
        sys.exit(1)
    if result is not None:
        show(result, settings)


def _settle_down() -> None:
    """End with the process that started this one, stay on one core, and come before other sessions where allowed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if CORE in os.environ:
            os.sched_setaffinity(0, {int(os.environ[CORE])})
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("-20")


def run(settings: Settings) -> Result | None:
    """Collective: measure what is asked for; the result on rank 0, None on the others."""
    torch.set_num_threads(1)
    sizes = dict(settings.workload)
    balanced = sizes.get("width") == BALANCED and sizes.pop("width")
    job = Job.open(
        Arena(
            workload=Workload(**sizes),
            attention=settings.attention,
            ffn=settings.ffn,
            micro_batches=settings.micro_batches,
            chunk_bytes=settings.chunk_bytes,
            device=settings.device,
            timeout=settings.timeout,
        )
    )
    if balanced:
        balance(job)
    sections = _sections(job, settings)
    workload = asdict(job.workload)
    job.close()
    if job.rank:
        return None
    return Result(command=settings.command, machine=machine(job.world), workload=workload, sections=sections)


def _sections(job: Job, settings: Settings) -> list[Section]:
    """One per link rate; where orders are tried, at the rate in the middle."""
    shape = ask_for_rate() if job.rank == 0 else None
    rates = settings.rates or [AS_IT_IS]
    _shape(job, shape, rates[len(rates) // 2])
    contenders, skipped = available(settings.contenders)
    comparison = Comparison(job, contenders)
    steps = settings.repetitions * len(rates) * (len(comparison.entries) + 2)
    sections = []
    with _progress(job.rank, steps) as tick:
        effort = Effort(repetitions=settings.repetitions, most_foreign_cpu=settings.most_foreign_cpu, tick=tick)
        for rate in rates:
            _shape(job, shape, rate)
            sections.append(replace(comparison.section(rate, effort), notes=skipped))
    return sections


def _shape(job: Job, shape: Callable[[str], None] | None, rate: str) -> None:
    """Collective: change the links, while nobody sends anything."""
    job.gather(None)
    if shape is not None and rate != AS_IT_IS:
        shape(rate)
    job.gather(None)


@contextlib.contextmanager
def _progress(rank: int, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on rank 0's terminal."""
    if rank:
        yield lambda what: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=steps)
        yield lambda what: progress.update(task, advance=1, description=what)


def show(result: Result, settings: Settings) -> None:
    """Print it, and write JSON, picture and, where asked for, the tables of the documentation."""
    folder = Path(settings.output_dir)
    result.save(folder / "bench.json")
    draw(result, folder / "bench.png")
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    for part in tables(result):
        console.print(part)
    if settings.docs is not None:
        write_docs(result, Path(settings.docs))
    console.print(f"{folder / 'bench.json'} and bench.png hold all of it.")


if __name__ == "__main__":
    main()
