"""What everything is measured in, and how often."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import BatchShape, Choices, Job
from lightning_afd.cost.times import Key
from lightning_afd.model.sample import Sample
from lightning_afd.placement import Layout
from lightning_afd.schedule.actions import Phase
from lightning_afd.timeline import Span

FEWEST = 2
"""Repetitions after a first one, whatever they take."""
Times = dict[str, float]
"""Seconds by kind of action."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What everything is measured in."""

    device: torch.device
    batch: BatchShape
    cluster: Cluster
    """Its scales are ignored."""
    choices: Choices
    now: Callable[[], float] = time.perf_counter
    """Seconds of any clock; called when the device has nothing left to do."""

    def time(self) -> float:
        """When the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.now()

    @property
    def dtype(self) -> torch.dtype:
        """Of messages and experts."""
        found = getattr(torch, self.choices.precision.compute)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of parameters."""
        return torch.float32 if self.choices.precision.weight_bytes > self.choices.precision.width else self.dtype

    def around(self) -> AbstractContextManager[Any]:
        """The context of a training step."""
        if self.dtype == self.weight_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are there at the same time: on CPUs new memory costs more than memory that
        is warm, while CUDA's is kept for the next call."""
        return 4 if self.device.type == "cpu" else 1

    def repetitions(self, seconds: float) -> Iterator[int]:
        """Numbers of repetitions: one, a few more, and on until they have taken so many seconds."""
        start, count = self.time(), 0
        while count <= FEWEST or self.time() - start < seconds:
            yield count
            count += 1

    def job(self, sample: Sample, layout: Layout) -> Job:
        """A step of one micro-batch whose estimates have no scales and no floor."""
        bare = replace(self.cluster, device=replace(self.cluster.device, scales={}, host_us=0.0))
        return Job(
            model=sample.shape, layout=layout, cluster=bare, batch=self.batch, micro_batches=1, choices=self.choices
        )


class Taken:
    """Seconds of whatever is repeated, by what it is."""

    def __init__(self) -> None:
        self._found: dict[Key, list[float]] = defaultdict(list)

    def add(self, key: Key, seconds: float) -> None:
        self._found[key].append(seconds)

    def add_spans(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self.add((span.action.op, span.action.layer, span.action.phase), span.seconds)

    def typical(self) -> dict[Key, float]:
        """Of each."""
        return {key: statistics.median(values) for key, values in self._found.items()}


class Timed:
    """Calls something and notes how long it took."""

    def __init__(self, setting: Setting, taken: Taken) -> None:
        self._setting, self._taken = setting, taken

    def __call__(self, phase: Phase, call: Callable[[], Any]) -> Any:
        start = self._setting.time()
        result = call()
        self._taken.add(("E", 0, phase), self._setting.time() - start)
        return result
