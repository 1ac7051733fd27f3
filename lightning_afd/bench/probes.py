"""Single links: how long a message takes and how fast many go, against their size; alone, both ways, and all to one."""

from __future__ import annotations

import time
from collections.abc import Iterator

from lightning_afd.bench.job import Job
from lightning_afd.bench.result import Probe
from lightning_afd.waits import Quantiles

SIZES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22))
PINGS = 30
MOST_SECONDS = 2.0
"""About so long are messages of one size sent."""
STREAM_BYTES, MOST_MESSAGES = 8 * 2**20, 64


def probes(job: Job, rate: str) -> list[Probe]:
    """Collective: all kinds and sizes; `rate` names the condition of links."""
    return [
        Probe(rate=rate, kind=kind, nbytes=nbytes, seconds=_latency(job, senders, nbytes, both), bandwidth=bandwidth)
        for kind, senders, both in _kinds(job)
        for nbytes in SIZES
        if (bandwidth := _bandwidth(job, senders, nbytes, both)) > 0
    ]


def _kinds(job: Job) -> Iterator[tuple[str, range, bool]]:
    """Name, senders to rank 0, and whether it sends to them, too."""
    last = range(job.world - 1, job.world)
    yield "one way", last, False
    yield "both ways", last, True
    if job.world > 2:
        yield "incast", range(1, job.world), False


def _latency(job: Job, senders: range, nbytes: int, both: bool) -> dict[str, float]:
    """Seconds from the start, which all begin together, until everything is where it should be."""
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < PINGS and not job.gather(time.perf_counter() - began > MOST_SECONDS)[0]:
        seconds.append(job.slowest(lambda: job.send_to_first(senders, nbytes, 1, both=both))[0])
    found = Quantiles.of(seconds)
    return {"p50": found.p50, "p95": found.p95, "p99": found.p99}


def _bandwidth(job: Job, senders: range, nbytes: int, both: bool) -> float:
    count = max(1, min(MOST_MESSAGES, STREAM_BYTES // nbytes))
    seconds, _ = job.slowest(lambda: job.send_to_first(senders, nbytes, count, both=both))
    return len(senders) * count * nbytes / seconds
