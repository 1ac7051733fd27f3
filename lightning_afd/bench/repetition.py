"""What one repetition has measured, and contenders that keep it: a disturbed one is thrown away as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_afd.bench.engine_step import EngineStep, computing
from lightning_afd.bench.job import Step
from lightning_afd.bench.ratios import Bound
from lightning_afd.bench.registry import Contender
from lightning_afd.bench.stages import Details
from lightning_afd.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class Account:
    """What the ranks of one of our own have recorded of a step."""

    timeline: Timeline
    step_bytes: int
    bound: Bound


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A contender's step in one repetition."""

    seconds: float
    account: Account | None
    """None of another system."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What one rank did in a step without communication."""

    role: str
    """With the number of micro-batches: "A R=4"."""
    layers: int
    spans: Sequence[Span]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What a repetition began with."""

    rate: float
    """Bytes per second."""
    alone: Sequence[Alone]
    """All ranks of all layouts and numbers of micro-batches."""

    @cached_property
    def compute(self) -> Mapping[str, float]:
        """Seconds without communication of the busiest rank, by role; all ranks compute at once, as in a step."""
        found: dict[str, float] = {}
        for one in self.alone:
            found[one.role] = max(found.get(one.role, 0.0), computing(one.spans))
        return found


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One step of each contender, by their order; nothing of it counts until it is kept."""

    condition: Condition
    samples: Sequence[Sample]


@dataclass(eq=False)
class Entry:
    """A contender that takes part."""

    contender: Contender
    step: Step
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    details: Details | None = None

    @property
    def engine(self) -> EngineStep | None:
        """The step, if it is one of our own."""
        return self.step if isinstance(self.step, EngineStep) else None

    def forget(self) -> None:
        """Begin a section."""
        self.seconds, self.bounds, self.details = [], [], None

    def keep(self, sample: Sample) -> None:
        """One more repetition."""
        self.seconds.append(sample.seconds)
        if self.engine is not None and sample.account is not None:
            self.details = self.details or Details(self.engine)
            self.details.add(sample.account.timeline, sample.account.step_bytes)
            self.details.bound_by = sample.account.bound.by
            self.bounds.append(sample.account.bound.seconds)
