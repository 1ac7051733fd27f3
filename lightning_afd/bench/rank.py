"""One rank of a run: `python -m lightning_afd.bench.rank <settings.json>`, with the variables of torchrun."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from lightning_afd.bench.balance import balance
from lightning_afd.bench.compare import Comparison, Effort
from lightning_afd.bench.job import Arena, Job
from lightning_afd.bench.machine import machine
from lightning_afd.bench.probes import probes
from lightning_afd.bench.registry import Contender, available
from lightning_afd.bench.result import Probe, Result, Section
from lightning_afd.bench.settings import BALANCED, Settings
from lightning_afd.bench.start import CORE, RESULT_FILE, ask_for_rate
from lightning_afd.bench.workload import Workload, busiest_expert
from lightning_afd.errors import AFDError

AS_IT_IS = "network as it is"
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run, and write the result; an error of the settings is one sentence and exit code 1."""
    _settle_down()
    settings = Settings.read(json.loads(Path(sys.argv[1]).read_text()))
    try:
        result = run(settings)
    except AFDError as error:
        sys.stderr.write(f"lightning-afd: {error}\n")
        sys.exit(1)
    if result is not None:
        result.save(Path(settings.output_dir) / RESULT_FILE)


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
    job = Job.open(_arena(settings))
    network = _Network(job, settings.rates)
    contenders, skipped = available(settings.contenders) if settings.contenders else ([], [])
    cells = settings.cells() if contenders else []
    probed = network.probe() if settings.probes else []
    sections: list[Section] = []
    with _progress(job.rank, settings.repetitions * len(cells) * len(network.rates) * (len(contenders) + 2)) as tick:
        effort = Effort(repetitions=settings.repetitions, most_foreign_cpu=settings.most_foreign_cpu, tick=tick)
        for cell in cells:
            arena = _arena(settings.at(cell))
            job.use(arena.workload, arena.micro_batches)
            found: dict[str, int] = {}
            if settings.at(cell).workload["width"] == BALANCED:
                balance(job)
                found = {"workload.width": job.workload.width}
            notes = [*skipped, *_routing(job)]
            for section in network.sections(contenders, effort):
                sections.append(replace(section, cell={**cell, **found}, notes=[*notes, *section.notes]))
    job.close()
    if job.rank:
        return None
    return Result(
        command=settings.command,
        machine=machine(job.world),
        workload={**settings.workload, "width": job.workload.width},
        sections=sections,
        probes=probed,
        picture=settings.picture,
    )


def _routing(job: Job) -> list[str]:
    """How uneven routing is, where that was asked for; on rank 0, whose notes are shown."""
    skew = job.workload.skew
    if not skew or job.rank:
        return []
    most = busiest_expert(job.workload, job.device)
    return [f"workload.skew={skew:g}: the busiest expert of a layer gets {most:.2f} times the mean of its experts"]


def _arena(settings: Settings) -> Arena:
    sizes = {name: value for name, value in settings.workload.items() if (name, value) != ("width", BALANCED)}
    return Arena(
        workload=Workload(**sizes),
        attention=settings.attention,
        ffn=settings.ffn,
        micro_batches=settings.micro_batches,
        chunk_bytes=settings.chunk_bytes,
        device=settings.device,
        timeout=settings.timeout,
    )


class _Network:
    """The conditions under which all is measured, one after another. All methods are collective."""

    def __init__(self, job: Job, rates: Sequence[str]) -> None:
        self.rates = list(rates) or [AS_IT_IS]
        self._job = job
        self._set = ask_for_rate() if job.rank == 0 else None

    def probe(self) -> list[Probe]:
        """Single links under each condition."""
        return [probe for rate in self._one_after_another() for probe in probes(self._job, rate)]

    def sections(self, contenders: Sequence[Contender], effort: Effort) -> list[Section]:
        """All contenders under each condition; where orders are tried, it is under the one in the middle."""
        self._make(self.rates[len(self.rates) // 2])
        comparison = Comparison(self._job, contenders)
        return [comparison.section(rate, effort) for rate in self._one_after_another()]

    def _one_after_another(self) -> Iterator[str]:
        for rate in self.rates:
            self._make(rate)
            yield rate

    def _make(self, rate: str) -> None:
        """Change the links, while nobody sends anything."""
        self._job.gather(None)
        if self._set is not None and rate != AS_IT_IS:
            self._set(rate)
        self._job.gather(None)


@contextlib.contextmanager
def _progress(rank: int, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on rank 0's terminal."""
    if rank:
        yield lambda what: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("preparing", total=steps)
        yield lambda what: progress.update(task, advance=1, description=what)


if __name__ == "__main__":
    main()
