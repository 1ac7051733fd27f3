"""Whether a layout fits into memory, for any number of micro-batches and any length of runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_afd.allocate.request import Recompute, Request
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


def footprints(request: Request, layout: Layout, rung: tuple[Recompute, bool]) -> tuple[Footprint, Footprint]:
    """Those of an A rank and of an F rank, of the groups that hold most (the first ones)."""
    job = request.job(layout, 1, rung)
    brief = replace(job, model=distinct(job.model), layout=replace(layout, groups=1))
    return _footprint(job, brief, "A"), _footprint(job, brief, "F")


def distinct(model: ModelShape) -> ModelShape:
    """The model with one layer of each kind: what is largest in it is largest in the whole model."""
    layers: list[LayerShape] = []
    for before, layer in zip((None, *model.layers), model.layers, strict=False):
        if layer != before and (layer.experts is None or layer not in layers):
            layers.append(layer)
    return replace(model, layers=tuple(layers))


def _footprint(job: Job, brief: Job, role: Role) -> Footprint:
    worker = Worker(role, 0)
    memory = memory_of(job, worker, 0.0)
    one, two = (bounded_activations(brief, worker, held) for held in (1, 2))
    return Footprint(
        role=role,
        static=memory.weights + memory.gradients + memory.optimizer,
        per_forward=two - one,
        once=one - (two - one),
        per_micro_batch=memory.messages,
    )


def run_length(workers: int, micro_batches: int, group: int) -> int:
    """Micro-batches of a run, as orders make them."""
    return max(workers, -(-micro_batches // -(-micro_batches // group)))


def held(shape: Shape, order: str, group: int) -> tuple[int, int]:
    """Forwards in flight of A0 and of F0."""
    run = run_length(2 * shape.groups, shape.micro_batches, group)
    attention, ffn = (pipelined(shape, place, run) for place in (0, 1))
    return attention, ffn + (PENDING if order == "zero-bubble" else 0)
