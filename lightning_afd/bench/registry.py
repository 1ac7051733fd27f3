"""Contenders by name. Another system joins with one entry: the packages that it needs and a function `make(job)`.

`make(job) -> step` is called on every rank, once per run and in the same order everywhere. It builds the contender's
model from `job.workload` (the weights of `job.workload.model(device)`, or the same sizes where the library brings its
own model) and returns a callable without arguments. Its i-th call makes one optimizer step of the job's optimizer on
`job.workload.batch(i)`, of which this rank takes its rows (`job.rows`), and returns this rank's part of the loss of the
global batch: the parts of all ranks add up. Barriers, clocks and ratios are not its business.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from lightning_afd.bench.names import Spec, parse
from lightning_afd.errors import PlanError

if TYPE_CHECKING:
    from lightning_afd.bench.job import Job, Step


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is measured under a name."""

    name: str
    make: Callable[[Job], Step]
    needs: tuple[str, ...] = ()
    """Modules that have to be importable."""
    same_weights: bool = True
    """Whether it starts from the weights of the workload, so that its losses must be those of the others."""

    def missing(self) -> list[str]:
        """Which of its modules are not there."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another system: the module of this package that has `make(job)`, and what it needs."""

    module: str
    """Imported only where the peer is asked for and its packages are there."""
    needs: tuple[str, ...] = ()
    function: str = "make"
    same_weights: bool = False

    def contender(self, name: str) -> Contender:
        return Contender(name=name, make=self._make, needs=self.needs, same_weights=self.same_weights)

    def _make(self, job: Job) -> Step:
        step: Step = getattr(importlib.import_module(self.module), self.function)(job)
        return step


_PEERS = "lightning_afd.bench.peers"
PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "ddp": Peer(module=f"{_PEERS}.ddp", same_weights=True),
        "pipeline-1f1b": Peer(module=f"{_PEERS}.pipelining", function="make_1f1b", same_weights=True),
        "pipeline-dualpipe-v": Peer(module=f"{_PEERS}.pipelining", function="make_dualpipe_v", same_weights=True),
        "transformers-ep": Peer(module=f"{_PEERS}.transformers_ep", needs=("accelerate",), same_weights=True),
        "deepspeed-moe": Peer(module=f"{_PEERS}.deepspeed_moe", needs=("deepspeed",)),
        "deepspeed-autoep": Peer(module=f"{_PEERS}.auto_ep", needs=("deepspeed",), same_weights=True),
        "torchtitan-moe": Peer(module=f"{_PEERS}.torchtitan_moe", needs=("torchtitan", "triton")),
    }
)
"""Other systems by name."""


def _make_own(job: Job, spec: Spec) -> Step:
    """With the engine, which needs torch: names are checked before that is loaded."""
    from lightning_afd.bench import engine_step

    return engine_step.make(job, spec)


def resolve(name: str, peers: Mapping[str, Peer] = PEERS) -> Contender:
    """The contender of a name; raises PlanError for one that is not known."""
    spec = parse(name)
    if spec is not None:
        return Contender(name=str(spec), make=partial(_make_own, spec=spec))
    if name in peers:
        return peers[name].contender(name)
    known = ", ".join(("afd", "ep", "experts-only", "flowmoe", *peers))
    raise PlanError(f"contender {name} is not known; choices: {known}, with /order, :micro-batches and +nodedup")


def available(names: Iterable[str], peers: Mapping[str, Peer] = PEERS) -> tuple[list[Contender], list[str]]:
    """The contenders that can run here, each once, and one line for each that cannot; raises PlanError without any."""
    found: list[Contender] = []
    skipped: list[str] = []
    for contender in (resolve(name, peers) for name in dict.fromkeys(names)):
        if missing := contender.missing():
            skipped.append(f"{contender.name}: skipped, as {' and '.join(missing)} is not installed")
        else:
            found.append(contender)
    if not found:
        raise PlanError(f"no contender can run here: {'; '.join(skipped)}")
    return found, skipped
