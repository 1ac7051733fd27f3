"""What the timelines of a contender's steps say together: kinds of actions and waits, shares of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from lightning_afd.bench.engine_step import EngineStep
from lightning_afd.regime import regime_of
from lightning_afd.timeline import Span, Timeline
from lightning_afd.waits import Quantiles, Usage, Wait, mean_usage, usage_of, waits_of


class Details:
    """What the timelines of a contender's steps say together."""

    def __init__(self, step: EngineStep) -> None:
        self._shape = step.shape
        self._stages = Stages(step.plan.layers)
        self.bound_by = ""
        self.step_bytes = 0
        self._usages: defaultdict[str, list[Usage]] = defaultdict(list)
        self.advice = ""

    def add(self, timeline: Timeline, step_bytes: int) -> None:
        """One more step; the advice is that of the last one."""
        waits = waits_of(timeline, self._shape)
        usage = usage_of(timeline, waits)
        self._stages.add(span for span in timeline.spans if timeline.lane(span) != "receive")
        self._stages.add_waits(waits)
        for rank, one in usage.items():
            self._usages[timeline.layout.name_of(rank)].append(one)
        self.advice = regime_of(timeline, usage).advice
        self.step_bytes = max(self.step_bytes, step_bytes)

    def usage(self) -> dict[str, dict[str, float]]:
        """Shares of the step by rank, on the average of all steps."""
        return {rank: mean_usage(usages).shares() for rank, usages in self._usages.items()}

    def stages(self) -> dict[str, dict[str, float]]:
        """Of all its steps."""
        return self._stages.quantiles()


class Stages:
    """Durations of each kind of action ("Af"; "Tf" is the tail) and wait, over all that else tells them apart."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, spans: Iterable[Span]) -> None:
        """Some actions."""
        for span in spans:
            action = span.action
            op = "T" if action.op == "A" and action.layer == self._layers else action.op
            self._seconds[op + action.phase].append(span.seconds)

    def add_waits(self, waits: Iterable[Wait]) -> None:
        """Some receives, by what was waited for."""
        for wait in waits:
            for cause, seconds in wait.seconds.items():
                self._seconds[cause].append(seconds)

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Count, P50, P95 and P99 in seconds."""
        found = {kind: Quantiles.of(seconds) for kind, seconds in self._seconds.items()}
        return {
            kind: {"count": one.count, "p50": one.p50, "p95": one.p95, "p99": one.p99} for kind, one in found.items()
        }
