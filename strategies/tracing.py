"""Record every so-many-th step: each rank measures, rank 0 joins what they bring and writes it down."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_afd.clock import HostClock, clock_of, host_name
from lightning_afd.engine import Engine
from lightning_afd.nics import counters, moved
from lightning_afd.recording import Recording, Versions, save
from lightning_afd.recording.gather import Part, join
from lightning_afd.strategies.driver import StepStats
from lightning_afd.waits import CAUSES, mean_usage, usage_of, waits_of

FIGURES = (*CAUSES, "bubble")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a recorded step says, equal on all ranks."""

    global_step: int
    shares: Mapping[str, float]
    """wait_for_A, wait_for_net, wait_for_F and bubble: shares of the step (0..1), on the average of all ranks."""


class Tracer:
    """Costs nothing in steps that are not recorded; in those one gather to rank 0, and one small exchange.

    The last batch of an accumulation window is what is recorded of a step, with the sum of its gradients.
    """

    def __init__(self, engine: Engine, every: int, transport: str, *, reads_nics: bool = False) -> None:
        """Records each optimizer step whose number is a multiple of `every`, none for 0.

        `reads_nics` is for one rank of each host: what passes its NICs in such a step.
        """
        self.figures: Figures | None = None
        """Of the last batch, where it was recorded."""
        self._engine = engine
        self._every = every
        self._transport = transport
        self._clock = clock_of(engine.device)
        self._package, self._host = version("lightning-afd"), host_name()  # both read files
        self._read_nics: Callable[[], dict[str, tuple[int, int]]] = counters if reads_nics else dict
        self._nics_before: dict[str, tuple[int, int]] = {}
        self._step = 0
        self._counts_before: Tensor | None = None
        self._tokens: tuple[tuple[int, ...], ...] = ()

    def begin(self, step: int) -> None:
        """A batch is about to run, the last one of optimizer step number `step` (from 1), or none (0)."""
        self.figures = None
        self._step = step if self._every and step % self._every == 0 else 0
        counts = self._engine.expert_counts
        self._counts_before = counts.so_far() if self._step else None
        counts.recording = bool(self._step)
        self._nics_before = self._read_nics() if self._step else {}
        self._engine.runtime.clock = self._clock if self._step else HostClock()

    def end_batch(self) -> None:
        """The batch has run forward and backward; its gradients are not summed yet."""
        if self._counts_before is None:
            return
        counts = self._engine.expert_counts
        layers = counts.by_layer(counts.so_far() - self._counts_before)
        self._tokens = tuple(tuple(layer_E.tolist()) for layer_E in layers) if self._engine.is_attention else ()
        self._counts_before, counts.recording = None, False

    def finish(self, stats: StepStats, folder: Callable[[], Path]) -> None:
        """Collective where a step is recorded and summed: rank 0 writes it into `folder()`, a collective itself."""
        if not self._step:
            return
        collectives, recording = self._engine.collectives, None
        parts = collectives.gather_object(self._part())
        shares = [0.0] * len(FIGURES)
        if parts is not None:
            recording = self._join(parts, stats)
            shares = mean_shares(recording)
        shares = collectives.all_gather(shares)[0]
        self.figures = Figures(global_step=self._step, shares=dict(zip(FIGURES, shares, strict=True)))
        self._step, place = 0, folder()
        if recording is not None:
            _write(recording, place)

    def _part(self) -> Part:
        runtime = self._engine.runtime
        return Part(
            times=array("d", runtime.times),
            reduces=tuple((reduce.start, reduce.end, int(reduce.nbytes)) for reduce in runtime.reduces),
            sent=self._engine.link.sent,
            tokens_per_expert=self._tokens,
            kernels=self._engine.kernels,
            host=self._host,
            source=self._clock.source,
            nics=moved(self._nics_before, self._read_nics()),
        )

    def _join(self, parts: list[Part], stats: StepStats) -> Recording:
        engine = self._engine
        joined = join(parts, engine.plan.layout, engine.executed)
        return Recording(
            global_step=self._step,
            unix_seconds=time.time(),
            timeline=joined.timeline,
            order=engine.executed.schedule.order,
            shape=engine.executed.schedule.shape,
            knobs=engine.plan.knobs,
            versions=self._versions(joined.kernels),
            clocks=joined.clocks,
            traffic=joined.traffic,
            nics=joined.nics,
            expert_maps=tuple(engine.expert_maps()),
            tokens_per_expert=joined.tokens_per_expert,
            loss=stats.loss,
            tokens=int(stats.tokens),
            seconds=stats.seconds,
        )

    def _versions(self, kernels: str) -> Versions:
        device = self._engine.device
        return Versions(
            package=self._package,
            torch=torch.__version__,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            experts=kernels,
            transport=self._transport,
            expert_map=self._engine.link.map_version,
        )


def mean_shares(recording: Recording) -> list[float]:
    """The figures of a recording, in the order of FIGURES."""
    waits = waits_of(recording.timeline, recording.shape)
    shares = mean_usage(usage_of(recording.timeline, waits).values()).shares()
    return [shares[name] for name in FIGURES]


def _write(recording: Recording, folder: Path) -> None:
    """A full disk is no reason to end a training job."""
    try:
        save(recording, folder)
    except OSError as error:
        rank_zero_warn(f"step {recording.global_step} could not be recorded in {folder} ({error}); training goes on")
