"""Predicted step times of what one would use without separate workers, each with its pipeline tuned.

Every method runs in the simulator with the same costs, links and rules of memory as separate workers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import Literal, NamedTuple

from lightning_afd.baselines.collocated import Collocated, Costs, free_transfers
from lightning_afd.baselines.outline import Outline
from lightning_afd.baselines.programs import Style, collocated_schedule
from lightning_afd.baselines.stages import Stages
from lightning_afd.baselines.units import Slot, interleaved, two_directions
from lightning_afd.cost.job import Job
from lightning_afd.errors import PlanError
from lightning_afd.schedule.shape import Schedule
from lightning_afd.simulate import Simulation, simulate

STAGES, VIRTUAL = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
"""The grid in which pipelines are tuned."""
Rung = tuple[Literal["none", "attention", "full"], bool]
RUNGS: tuple[Rung, ...] = (("none", False), ("full", False))
"""What is computed again: of attention, and of experts."""


LIKELY = 3
"""Settings that are looked at in outline."""
PLAIN = Style()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train on collocated ranks."""

    order: Literal["interleaved", "two-directions"] = "interleaved"
    style: Style = PLAIN
    parts: int = 1
    """Parts of a micro-batch that pass a layer's experts one behind the other."""
    together: int = 1
    """Micro-batches that pass a layer one behind the other."""


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "exposed": Method(),
        "experts-only": Method(parts=2),
        "flowmoe": Method(style=Style(pipelined=True), together=2),
        "dualpipe": Method(order="two-directions", style=Style(split=True)),
    }
)
"""exposed: interleaved 1F1B of Megatron-LM; nothing is computed while tokens travel.
experts-only: transfers hide behind experts of the other half of a micro-batch, as in Tutel (2206.03382) and Comet
(2502.19811), not behind attention; Comet's finer tiles and fused kernels are not modelled.
flowmoe: two micro-batches pass attention, router and experts one behind the other (2510.00207, R = 2); chunks of
reduces are asked for apart (`Costs.chunked`); the system itself has no pipeline stages.
dualpipe: two directions, a forward's transfers hide behind a backward and the other way round, weight gradients fill
the ends (2412.19437); parameters are kept twice; that transfers take SMs from the computation is not modelled."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is tuned: pipeline stages, chunks of layers per stage, and what is computed twice."""

    method: str
    layout: Collocated
    virtual: int = 1
    rung: Rung = RUNGS[0]
    whole: bool = False
    """Layers are computed again as a whole, exchanges included, so that their inputs are all they keep: full
    recomputation of Megatron-LM (2205.05198). Known in outline only."""

    def describe(self) -> str:
        """`PP4 x DP32 (EP16), v=7, recompute`."""
        layout, (attention, experts) = self.layout, self.rung
        found = f"PP{layout.stages} x DP{layout.data} (EP{layout.experts}), v={self.virtual}"
        found += {"none": "", "attention": ", recompute attention", "full": ", recompute"}[attention]
        return found + (" and experts" if experts else "") + (", recompute whole layers" if self.whole else "")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A setting with its costs and its schedule."""

    setting: Setting
    costs: Costs

    @property
    def _order(self) -> Callable[[int], list[Slot]]:
        method, shape = METHODS[self.setting.method], self.costs.shape
        if method.order == "two-directions":
            return partial(two_directions, shape)
        return partial(interleaved, shape, together=method.together * method.parts)

    @property
    def schedule(self) -> Schedule:
        """Of all stages."""
        name = self.setting.method
        return collocated_schedule(name, self.costs.shape, METHODS[name].style, self._order)

    @cached_property
    def outline(self) -> Outline:
        """The step in the large, which is much quicker to look through."""
        return Outline(
            style=METHODS[self.setting.method].style, costs=self.costs, order=self._order, whole=self.setting.whole
        )

    @property
    def least_memory(self) -> float:
        """Bytes without activations."""
        return self.costs.fixed_memory()

    @property
    def possible(self) -> bool:
        """Whether a rank has room for it without activations."""
        return self.least_memory <= self.costs.job.cluster.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of a rank."""
        limit, stages = self.costs.job.cluster.device.memory_bytes, range(self.costs.shape.depth)
        return self.possible and all(self._memory(stage) <= limit for stage in stages)

    @property
    def memory(self) -> float:
        """Bytes on the fullest rank."""
        return max(self._memory(stage) for stage in range(self.costs.shape.depth))

    def _memory(self, stage: int) -> float:
        return self.costs.stage_memory(stage) + self.outline.activations(stage)

    @cached_property
    def seconds(self) -> float:
        """Of the step in outline, the optimizer's included."""
        return self.outline.seconds + self.costs.update_seconds()

    def run(self) -> Prediction:
        """Simulate it."""
        if self.setting.whole:
            raise PlanError(f"{self.setting.describe()}: whole layers can't be computed again in this simulation")
        simulation = simulate(self.schedule, self.costs.load())
        return Prediction(trial=self, simulation=simulation, seconds=simulation.seconds + self.costs.update_seconds())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of a method, simulated."""

    trial: Trial
    simulation: Simulation
    seconds: float
    """Of the step, the optimizer's included."""

    @cached_property
    def exposed(self) -> float:
        """Share of the step that free transfers would save (0..1)."""
        free = simulate(self.trial.schedule, free_transfers(self.trial.costs.load()))
        return (self.simulation.seconds - free.seconds) / self.seconds

    @property
    def bound(self) -> tuple[str, float]:
        """What the busiest lane does (compute, send, receive or reduce), and its share of the step (0..1)."""
        lane = max(self.simulation.busy, key=lambda key: self.simulation.busy[key])
        return lane[2], self.simulation.busy[lane] / self.seconds


def predict_baselines(job: Job, nodes: tuple[int, ...] = (1, 2), most: int = 2) -> dict[str, Prediction]:
    """For each method, with experts shared by the ranks of one node and of two: the best of its `most` likely settings.

    The job's cluster is used whole, with the sequences of a step divided over all ranks. Names are such as
    "exposed, 2 nodes"; methods that can't run at all (too few ranks, layers or micro-batches) are left out. Where no
    setting fits into memory (`trial.fits`), the smallest is given.
    """
    found = {}
    for name in METHODS:
        for count in nodes:
            best = tuned(job, name, count * job.cluster.devices_per_node, most)
            if best is not None:
                found[f"{name}, {count} node{'s' * (count > 1)}"] = best
    return found


def tuned(job: Job, method: str, experts: int, most: int = 2) -> Prediction | None:
    """The best of the `most` likely settings of a method with groups of so many ranks that fit into memory."""
    trials = sorted(_trials(job, method, experts, _ways(RUNGS)), key=_estimate)
    chosen = list(islice((trial for trial in trials if trial.fits), most))
    if not chosen and trials:
        chosen = [min(trials, key=lambda trial: trial.least_memory)]
    return min((trial.run() for trial in chosen), key=lambda found: found.seconds, default=None)


def outlined(job: Job, method: str, experts: int, rungs: tuple[Rung, ...], *, whole: bool) -> Trial | None:
    """The best, in outline, of the likely settings that fit into memory; None where none does.

    `whole`: layers may be computed again as a whole, too.
    """
    ways = [*_ways(rungs), *([_Way(rung=RUNGS[0], whole=True)] if whole else [])]
    possible = (trial for trial in _trials(job, method, experts, ways) if trial.possible)
    trials = sorted(possible, key=_estimate)
    fitting = islice((trial for trial in trials if trial.fits), LIKELY)
    return min(fitting, key=lambda trial: trial.seconds, default=None)


class _Way(NamedTuple):
    """What is computed again."""

    rung: Rung
    whole: bool = False


def _ways(rungs: tuple[Rung, ...]) -> list[_Way]:
    return [_Way(rung) for rung in rungs]


def _trials(job: Job, method: str, experts: int, ways: list[_Way]) -> Iterator[Trial]:
    """All settings that the ranks, layers and micro-batches allow."""
    ranks, layers = job.cluster.devices, len(job.model.moe)
    rows = job.layout.attention * job.micro_batches
    for stages in (stages for stages in STAGES if stages <= layers and not ranks % (stages * experts)):
        layout = Collocated(data=ranks // stages, experts=experts, stages=stages)
        for virtual in sorted({min(virtual, layers // stages) for virtual in VIRTUAL}):
            micro_batches = -(-rows // layout.data)
            if _possible(METHODS[method], stages, virtual, micro_batches):
                for way in ways:
                    setting = Setting(method=method, layout=layout, virtual=virtual, rung=way.rung, whole=way.whole)
                    yield trial(job, setting, micro_batches)


def _possible(method: Method, stages: int, virtual: int, micro_batches: int) -> bool:
    """Whether an order exists."""
    if method.order == "two-directions":
        return virtual == 1 and stages % 2 == 0 and micro_batches % 2 == 0 and micro_batches >= 2 * stages
    blocks = -(-micro_batches // method.together)
    return virtual == 1 or (stages > 1 and blocks % stages == 0)


def trial(job: Job, setting: Setting, micro_batches: int) -> Trial:
    """A setting for so many micro-batches of the job's size on each data rank."""
    method, layout = METHODS[setting.method], setting.layout
    shape = Stages(
        layers=len(job.model.moe),
        groups=layout.stages,
        chunks=layout.stages * setting.virtual,
        micro_batches=micro_batches * method.parts,
        split_attention=method.style.split,
        directions=2 if method.order == "two-directions" else 1,
    )
    again, experts = setting.rung
    job = replace(job, choices=replace(job.choices, recompute=again, recompute_experts=experts))
    return Trial(setting=setting, costs=Costs(job=job, layout=layout, shape=shape, parts=method.parts))


def _estimate(trial: Trial) -> float:
    """About the seconds of a step: the fullest stage's work, transfers as far as they show, and the bubble."""
    costs, method = trial.costs, METHODS[trial.setting.method]
    compute, network = costs.work(again=trial.setting.whole)
    hidden = method.order == "two-directions" or method.together > 1
    stages = [max(c, n) if hidden else c + n / method.parts for c, n in zip(compute, network, strict=True)]
    bubble = (costs.shape.depth - 1) / trial.setting.virtual * sum(stages) / len(stages)
    return costs.shape.micro_batches * max(stages) + bubble * method.parts * method.together
