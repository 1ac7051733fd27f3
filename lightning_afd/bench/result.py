"""What a run has measured, as values that are written to and read from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_afd.bench.conditions import plain_rate
from lightning_afd.bench.ratios import Spread, disagreement, paired
from lightning_afd.bench.settings import title_of

LEAST_RATE, MOST_RATE = 0.85, 1.05
"""Of the rate of a link that was asked for: what plain messages reach."""
SAME_LOSS = 1e-4
"""By how much losses of equal steps may differ, relative: sums in float32 have other orders."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender in one section; lists are by repetition."""

    name: str
    plan: str
    """What it does: layout, order, micro-batches; empty for other systems."""
    seconds: list[float]
    """Of a step, on the slowest rank."""
    losses: list[float]
    """Of the global batch, steps before the first repetition included."""
    same_weights: bool = True
    step_bytes: int = 0
    """Of the busiest direction of a rank; 0: not counted."""
    bounds: list[float] = field(default_factory=list)
    """Seconds of `bound`, from the same repetition."""
    bound_by: str = ""
    usage: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Per rank, shares of the step: compute, send, waits, bubble."""
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Per kind of action ("Af") and of wait ("wait_for_net"): count, p50, p95, p99 in seconds."""
    overhead: Mapping[str, float] = field(default_factory=dict)
    """Per role, the engine's own work over the step: neither computation nor waiting nor kernels."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Per rank, bytes by which its memory grows at most during a step; 0 where nobody knows."""
    advice: str = ""
    """What bounds its last step."""

    @property
    def over_bound(self) -> Spread | None:
        """Step over bound."""
        return paired(self.seconds, self.bounds) if self.bounds else None


@dataclass(frozen=True, kw_only=True)
class Section:
    """All contenders side by side under one condition."""

    rate: str
    """The condition of links, such as "500mbit"."""
    measured: list[Measured]
    link_rates: list[float]
    """Bytes per second of plain messages, by repetition."""
    compute: Mapping[str, list[float]]
    """Seconds of computation alone, the busiest rank of a role, by repetition: "A R=4", "F R=4", "AF R=1"."""
    cell: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this section only, such as {"workload.seq_len": 256}."""
    operators: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """Per role ("A R=4") and kind of action, without any communication: like `Measured.stages`."""
    foreign_cpu: list[float] = field(default_factory=list)
    """CPU seconds that other processes of the machine took during each repetition."""
    notes: list[str] = field(default_factory=list)
    """Contenders that were left out, and why."""

    @property
    def title(self) -> str:
        """`500mbit, seq_len 256`."""
        return ", ".join(part for part in (self.rate, title_of(self.cell)) if part)

    def ratio(self, name: str) -> Spread:
        """How many times as long as the first contender's a step of this one takes, in pairs of one repetition."""
        by_name = {one.name: one for one in self.measured}
        return paired(by_name[name].seconds, self.measured[0].seconds)

    @property
    def rate_problem(self) -> str:
        """What is wrong with the rate of links that was asked for, if anything: TCP over Ethernet gets 0.957 of it."""
        asked = plain_rate(self.rate)
        found = Spread.of([8 * rate for rate in self.link_rates]).median
        if asked is None or LEAST_RATE * asked < found < MOST_RATE * asked:
            return ""
        return f"links have {found / 1e9:.3f} Gbit/s, and {asked / 1e9:.3f} was asked for: do not believe this table"

    @property
    def disagreement(self) -> float:
        """The largest relative difference of the losses of contenders with the same weights."""
        return disagreement({one.name: one.losses for one in self.measured if one.same_weights})

    @property
    def summary(self) -> str:
        """One line."""
        first, *others = self.measured
        step = Spread.of(first.seconds)
        near = f", {first.over_bound.median:.2f} x its bound" if first.over_bound else ""
        against = ", ".join(f"{self.ratio(one.name).median:.2f}x {one.name}" for one in others)
        speed = f"; speed: {against}" if against else ""
        return f"{self.title}: {first.name} {step.median:.3f} s a step{near}{speed}"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Messages of one size over single links, all other links being idle."""

    rate: str
    kind: str
    """What is sent: "one way", "both ways" at once, or "incast" of all ranks to the first one."""
    nbytes: int
    """Of a message."""
    seconds: Mapping[str, float]
    """p50, p95 and p99 of a single message of each sender; of both ways of a pair."""
    bandwidth: float
    """Bytes per second that come in at the receiver while many messages are on their way."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A whole run."""

    command: str
    machine: Mapping[str, Any]
    workload: Mapping[str, Any]
    sections: list[Section]
    probes: list[Probe] = field(default_factory=list)
    """Single links."""
    picture: str = "map"
    """How many sections are drawn: "map" or "lines"."""

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    def joined(self, other: Result) -> Result:
        """This one with what another run of the same command has measured, too."""
        return replace(self, sections=[*self.sections, *other.sections], probes=[*self.probes, *other.probes])

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text())
        sections = [
            Section(**{**section, "measured": [Measured(**one) for one in section["measured"]]})
            for section in fields.pop("sections")
        ]
        probes = [Probe(**probe) for probe in fields.pop("probes")]
        return cls(sections=sections, probes=probes, **fields)
