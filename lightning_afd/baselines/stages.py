"""The size of a step where attention and experts of a layer are on the same ranks, in stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import split_sizes
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Stages(Shape):
    """Layers are cut into `chunks` runs of nearly equal length; stage g, the worker pair A g and F g, owns those with
    number mod groups == g. A combine comes back to the stage of its layer, which adds up h and passes it on (H).

    With two directions each stage also owns the chunk that the stage opposite to it has, and odd micro-batches pass the
    stages backwards, as in DualPipe (DeepSeek-V3, 2412.19437, section 3.2.1).
    """

    chunks: int
    """Runs of layers: stages times virtual stages."""
    directions: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.depth <= self.chunks <= self.layers or self.chunks % self.depth:
            raise PlanError(
                f"{self.chunks} chunks of {self.layers} layers for {self.depth} stages: a multiple of the stages, and "
                "at most one per layer, is needed"
            )

    def layers_of(self, chunk: int) -> range:
        """The layers of a chunk."""
        sizes = split_sizes(self.layers, self.chunks)
        start = sum(sizes[:chunk])
        return range(start, start + sizes[chunk])

    def stage_of(self, segment: int, micro_batch: int) -> int:
        """The stage that has a layer, or the tail, for a micro-batch."""
        shorter, longer = divmod(self.layers, self.chunks)
        layer = min(segment, self.layers - 1)
        inside = layer // (shorter + 1)
        chunk = inside if inside < longer else (layer - longer) // shorter
        stage = chunk % self.depth
        return self.depth - 1 - stage if self.directions == 2 and micro_batch % 2 else stage

    def attention(self, segment: int) -> Worker:
        """The A worker of a segment, for even micro-batches."""
        return Worker("A", self.stage_of(segment, 0))

    @property
    def tail(self) -> Worker:
        """The last stage, for even micro-batches."""
        return self.attention(self.layers)

    def experts(self, layer: int) -> Worker:
        """The F worker of a layer, for even micro-batches."""
        return Worker("F", self.stage_of(layer, 0))

    def owner(self, action: Action) -> Worker:
        """The worker that computes an A or E action."""
        return Worker("F" if action.op == "E" else "A", self.stage_of(action.layer, action.micro_batch))

    def endpoints(self, action: Action) -> tuple[Worker, Worker]:
        """Sender and receiver: D and C stay in their stage, H goes to the next one or comes back."""
        here = self.stage_of(action.layer, action.micro_batch)
        attention, experts = Worker("A", here), Worker("F", here)
        if action.op in "DC":
            return (attention, experts) if action.op == "D" else (experts, attention)
        after = Worker("A", self.stage_of(action.layer + 1, action.micro_batch))
        return (attention, after) if action.phase == "f" else (after, attention)

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """As with separate workers, but for the two ends of a hop: h is complete before it, dh is used behind it."""
        layer, m = action.layer, action.micro_batch
        match action.op + action.phase:
            case "Af" if layer > 0 and self.hops(layer - 1):
                return (Action("H", layer - 1, "f", m),)
            case "Hf":
                return (Action("C", layer, "f", m), Action("A", layer, "f", m))
            case "Db" if self.hops(layer):
                return (Action("H", layer, "b", m),)
        return super().dependencies(action)
