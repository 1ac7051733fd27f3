"""Seconds and bytes of each action of a step, on the busiest rank of its worker group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from lightning_afd.cost.compute import expert_seconds, optimizer_seconds, segment_seconds
from lightning_afd.cost.job import Job
from lightning_afd.cost.memory import dense_parameters, expert_parameters
from lightning_afd.cost.reduces import reduce_seconds
from lightning_afd.cost.traffic import copies
from lightning_afd.cost.transfers import ActionCost, transfers
from lightning_afd.placement import Role, Worker
from lightning_afd.schedule.actions import Action, Op, Phase
from lightning_afd.schedule.shape import Shape

Key = tuple[Op, int, Phase]
_Entry = tuple[Op, Phase, ActionCost]
_ENDS: Mapping[Op, tuple[Role, Role]] = MappingProxyType(
    {"D": ("A", "F"), "C": ("F", "A"), "H": ("A", "A"), "L": ("A", "A")}
)
"""Who sends a transfer, and who gets it."""


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Seconds per micro-batch in which the busiest rank of a worker computes, sends and receives."""

    compute: float
    send: float
    receive: float

    @property
    def bound(self) -> float:
        """No schedule of many micro-batches can be faster than this, each."""
        return max(self.compute, self.send, self.receive)


@dataclass(frozen=True, kw_only=True)
class Update:
    """What follows the last backward of a step, on the busiest ranks."""

    all_reduce_bytes: float
    """Dense gradients of an A rank."""
    all_reduce_seconds: float
    """Their sum over the replicas, segment by segment, alone on the links."""
    optimizer_seconds: float


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Layers of one shape between the same workers."""

    layers: tuple[int, ...]
    costs: tuple[_Entry, ...]
    """Of the actions of each of them."""

    def actions(self) -> Iterator[tuple[Action, ActionCost]]:
        """Those of the first of the layers, for a micro-batch."""
        for op, phase, cost in self.costs:
            yield Action(op, self.layers[0], phase, 0), cost


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What a simulator or an allocator needs of a job."""

    shape: Shape
    alike: tuple[Alike, ...]
    tail: Mapping[Phase, ActionCost]
    """Of segment `layers`."""
    reduces: tuple[float, ...]
    """Of each segment: summing its dense gradients over the replicas, alone on the links."""
    update: Update

    @cached_property
    def actions(self) -> Mapping[Key, ActionCost]:
        """By op, layer (segment) and phase: the same for each micro-batch."""
        found: dict[Key, ActionCost] = {("A", self.shape.layers, phase): cost for phase, cost in self.tail.items()}
        for kind in self.alike:
            found |= {(op, layer, phase): cost for layer in kind.layers for op, phase, cost in kind.costs}
        return found

    def of(self, action: Action) -> ActionCost:
        """The cost of an action."""
        return self.actions[action.op, action.layer, action.phase]

    def busy(self) -> dict[Worker, Busy]:
        """What one micro-batch of each A rank costs each worker."""
        compute, send, receive = (dict.fromkeys(self.shape.workers(), 0.0) for _ in range(3))
        compute[self.shape.tail] += sum(cost.seconds for cost in self.tail.values())
        for kind in self.alike:
            for action, cost in kind.actions():
                if action.is_transfer:
                    sender, receiver = self.shape.endpoints(action)
                    send[sender] += len(kind.layers) * cost.send_seconds
                    receive[receiver] += len(kind.layers) * cost.receive_seconds
                else:
                    compute[self.shape.owner(action)] += len(kind.layers) * cost.seconds
        return {w: Busy(compute=compute[w], send=send[w], receive=receive[w]) for w in self.shape.workers()}

    def bound(self) -> float:
        """Seconds per step that neither the busiest rank's computation nor its links can fall below."""
        return self.shape.micro_batches * max(busy.bound for busy in self.busy().values())


def step_costs(job: Job) -> StepCosts:
    """The cost of every action of a job's step. Layers of one shape between the same workers are looked at once."""
    shape, known = job.shape, defaultdict[Hashable, list[int]](list)
    for layer, kind in enumerate(job.model.kinds):
        known[kind, shape.attention(layer), shape.attention(layer + 1), shape.experts(layer)].append(layer)
    tail = segment_seconds(job, job.model.segments[-1], 0.0)
    reduces = reduce_seconds(job)
    return StepCosts(
        shape=shape,
        alike=tuple(Alike(layers=tuple(layers), costs=tuple(_layer(job, layers[0]))) for layers in known.values()),
        tail={phase: ActionCost(seconds=seconds) for phase, seconds in tail.items()},
        reduces=reduces,
        update=_update(job, reduces),
    )


def _layer(job: Job, layer: int) -> Iterator[_Entry]:
    """What cores have to do for messages counts for the computation that they follow or that needs them."""
    segment, experts = job.model.segments[layer], job.model.moe[layer]
    moved = list(transfers(job, layer))
    for phase, seconds in segment_seconds(job, segment, copies(job, experts)).items():
        yield "A", phase, ActionCost(seconds=seconds + _handling(moved, "A", phase))
    for phase, seconds in expert_seconds(job, experts).items():
        yield "E", phase, ActionCost(seconds=seconds + _handling(moved, "F", phase))
    yield from moved


def _handling(moved: Iterable[_Entry], role: Role, phase: Phase) -> float:
    """Seconds of a rank's core for the messages of a layer and micro-batch."""
    seconds = 0.0
    for op, way, cost in moved:
        sender, receiver = _ENDS[op]
        if way == phase:
            seconds += cost.sender_seconds * (sender == role) + cost.receiver_seconds * (receiver == role)
    return seconds


def _update(job: Job, reduces: tuple[float, ...]) -> Update:
    """A group 0 has embedding and head, so that its dense gradients are the most."""
    dense = dense_parameters(job, 0)
    experts = [expert_parameters(job, group, 0) for group in range(job.layout.depth)]
    sharded = dense / (job.layout.attention if job.choices.shard_optimizer else 1)
    return Update(
        all_reduce_bytes=dense * job.choices.precision.gradient_bytes,
        all_reduce_seconds=sum(reduces[:-1][:: job.layout.depth]) + reduces[-1],
        optimizer_seconds=optimizer_seconds(job, max(sharded, *experts)),
    )
