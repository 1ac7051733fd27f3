"""Whether a layout fits into memory, for any number of micro-batches and any length of runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_afd.allocate.request import RUNGS, Request, Rung
from lightning_afd.cost.in_flight import pipelined
from lightning_afd.cost.job import Job
from lightning_afd.cost.memory import bounded_activations, memory_of
from lightning_afd.cost.model import LayerShape, ModelShape
from lightning_afd.placement import Layout, Role, Worker
from lightning_afd.schedule.shape import Shape

PENDING = 8
"""Weight gradients of experts that zero-bubble puts off: their activations stay as long."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on the fullest rank of a role."""

    role: Role
    static: float
    """Weights, gradients, optimizer state."""
    per_forward: float
    """Of a layer and micro-batch, from its forward to its backward."""
    once: float
    """Of the tail."""
    per_micro_batch: float
    """Messages."""

    def total(self, held: int, micro_batches: int) -> float:
        """With so many forwards in flight and so many micro-batches per pass."""
        return self.static + held * self.per_forward + self.once + micro_batches * self.per_micro_batch

    def describe(self, held: int, micro_batches: int) -> str:
        """`24.1 GB of weights ... + 60.0 GB of activations + 3.1 GB of messages`."""
        parts = {
            "weights, gradients and optimizer state": self.static,
            f"activations ({held} forwards in flight)": held * self.per_forward + self.once,
            "messages": micro_batches * self.per_micro_batch,
        }
        return " + ".join(f"{nbytes / 1e9:.1f} GB of {name}" for name, nbytes in parts.items())


class Fitting:
    """Footprints of a request's layouts; what many of them share is worked out once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._brief = distinct(request.model)
        self._static: dict[tuple[Role, int, int], float] = {}

    @property
    def limit(self) -> float:
        """Bytes that a rank may use."""
        return self._request.cluster.device.memory_bytes

    def hopeless(self, layout: Layout) -> bool:
        """Whether not even weights, gradients and optimizer state fit, or one micro-batch at a time does not."""
        if max(self.static(layout, "A"), self.static(layout, "F")) > self.limit:
            return True
        shape = self.shape(layout, 1)
        counts = held(shape, "af-pipe", 2 * layout.depth)
        sides = self.sides(layout, self._request.rungs[-1])
        return any(side.total(count, 1) > self.limit for side, count in zip(sides, counts, strict=True))

    def shape(self, layout: Layout, micro_batches: int) -> Shape:
        """Of a pass."""
        return Shape(layers=len(self._request.model.moe), groups=layout.depth, micro_batches=micro_batches)

    def static(self, layout: Layout, role: Role) -> float:
        """Bytes of weights, gradients and optimizer state on the fullest rank of a role."""
        sharded = self._request.choices.shard_optimizer
        ranks = layout.ffn if role == "F" else layout.attention if sharded else 0
        key = (role, layout.depth, ranks)
        if key not in self._static:
            memory = memory_of(self._request.job(layout, 1, RUNGS[0]), Worker(role, 0), 0.0)
            self._static[key] = memory.weights + memory.gradients + memory.optimizer
        return self._static[key]

    def sides(self, layout: Layout, rung: Rung) -> tuple[Footprint, Footprint]:
        """Those of an A rank and of an F rank, of the groups that hold most (the first ones)."""
        brief = replace(self._request.job(layout, 1, rung), model=self._brief, layout=replace(layout, groups=1))
        return self._side(layout, brief, "A"), self._side(layout, brief, "F")

    def _side(self, layout: Layout, brief: Job, role: Role) -> Footprint:
        worker = Worker(role, 0)
        one, two = (bounded_activations(brief, worker, count) for count in (1, 2))
        return Footprint(
            role=role,
            static=self.static(layout, role),
            per_forward=two - one,
            once=one - (two - one),
            per_micro_batch=memory_of(brief, worker, 0.0).messages,
        )


def distinct(model: ModelShape) -> ModelShape:
    """The model with one layer of each kind: what is largest in it is largest in the whole model."""
    layers: list[LayerShape] = []
    for before, layer in zip((None, *model.layers), model.layers, strict=False):
        if layer != before and (layer.experts is None or layer not in layers):
            layers.append(layer)
    return replace(model, layers=tuple(layers))


def run_length(workers: int, micro_batches: int, group: int) -> int:
    """Micro-batches of a run, as orders make them."""
    return max(workers, -(-micro_batches // -(-micro_batches // group)))


def held(shape: Shape, order: str, group: int) -> tuple[int, int]:
    """Forwards in flight of A0 and of F0."""
    run = run_length(2 * shape.depth, shape.micro_batches, group)
    attention, ffn = (pipelined(shape, place, run) for place in (0, 1))
    return attention, ffn + (PENDING if order == "zero-bubble" else 0)
