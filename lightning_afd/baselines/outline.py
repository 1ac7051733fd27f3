"""A step of collocated stages in the large: slots of an order, of which each kind is simulated once, in a row.

What the whole simulation adds is small: a hop to the next stage shares links with the exchanges of the next slot, and
the two units of a slot end at different times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_afd.baselines.collocated import Costs
from lightning_afd.baselines.kept import Kept
from lightning_afd.baselines.programs import Style, slot_actions
from lightning_afd.baselines.units import Slot, Unit
from lightning_afd.load import Load
from lightning_afd.placement import ROLES, Role, Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Schedule
from lightning_afd.simulate import simulate

_End = tuple[bool, int, int]
"""Whether it is a forward, chunk, and first micro-batch of what a stage passes on."""


@dataclass(frozen=True, kw_only=True)
class SlotCost:
    """What a slot takes, alone on its stage."""

    seconds: float
    change: tuple[float, float]
    """Bytes of activations at its end beyond those at its start, of attention and of experts."""
    peak: tuple[float, float]
    """The most in between, likewise."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The slots of all stages and what they cost."""

    style: Style
    costs: Costs
    order: Callable[[int], list[Slot]]
    whole: bool = False
    """Layers keep their inputs only, and are computed again as a whole, exchanges included, before their backward."""

    @cached_property
    def _load(self) -> Load:
        return self.costs.load()

    @cached_property
    def _kept(self) -> Kept:
        return Kept(self.costs.part, whole=self.whole)

    @cached_property
    def _kinds(self) -> list[int]:
        """Chunks with layers of the same shapes have equal numbers."""
        stages, layers, chunks = self.costs.shape, self.costs.job.model.kinds, dict[Hashable, int]()
        own = [tuple(layers[layer] for layer in stages.layers_of(chunk)) for chunk in range(stages.chunks)]
        return [chunks.setdefault((n == len(own) - 1, kind), len(chunks)) for n, kind in enumerate(own)]

    @cached_property
    def _known(self) -> dict[Hashable, SlotCost]:
        return {}

    @cached_property
    def _slots(self) -> dict[int, list[tuple[Slot, SlotCost]]]:
        return {}

    def slots(self, stage: int) -> list[tuple[Slot, SlotCost]]:
        """Those of a stage in their order."""
        if stage not in self._slots:
            self._slots[stage] = [(slot, self._cost(stage, slot)) for slot in self.order(stage)]
        return self._slots[stage]

    def _cost(self, stage: int, slot: Slot) -> SlotCost:
        kind = tuple([(unit.part, self._kinds[unit.chunk], len(unit.micro_batches)) for unit in slot])
        if kind not in self._known:
            self._known[kind] = self._alone(stage, slot)
        return self._known[kind]

    def _alone(self, stage: int, slot: Slot) -> SlotCost:
        programs = {role: self._program(slot, role) for role in ROLES}
        again = [(replace(unit, part="f"),) for unit in slot if self.whole and unit.part in "bi"]
        seconds = sum(self._seconds(stage, [self._program(s, role) for role in ROLES]) for s in again)
        change, peak = zip(*(self._kept.through(programs[role], role) for role in ROLES), strict=True)
        return SlotCost(seconds=seconds + self._seconds(stage, list(programs.values())), change=change, peak=peak)

    def _program(self, slot: Slot, role: Role) -> tuple[Action, ...]:
        """Without hops."""
        actions = slot_actions(self.costs.shape, self.style, slot, role)
        return tuple(action for action in actions if action.op != "H")

    def _seconds(self, stage: int, programs: list[tuple[Action, ...]]) -> float:
        shape = self.costs.shape
        all_of_them: dict[Worker, tuple[Action, ...]] = dict.fromkeys(shape.workers(), ())
        all_of_them |= {Worker(role, stage): program for role, program in zip(ROLES, programs, strict=True)}
        simulation = simulate(Schedule(shape, "slot", all_of_them), self._load)
        return max(span.end for span in simulation.timeline.spans)

    def activations(self, stage: int) -> float:
        """Bytes on a rank of a stage at the fullest moment of its attention and of its experts."""
        total = 0.0
        for index in range(len(ROLES)):
            held = most = 0.0
            for _, cost in self.slots(stage):
                most = max(most, held + cost.peak[index])
                held += cost.change[index]
            total += most
        return total

    @property
    def seconds(self) -> float:
        """Of a step, without the optimizer's."""
        slots = [self.slots(stage) for stage in range(self.costs.shape.depth)]
        return _Chain(slots, self.costs, self._load).to_the_end()


class _Chain:
    """Slots of all stages, each as soon as its stage is free and what it works on has arrived."""

    def __init__(self, stages: list[list[tuple[Slot, SlotCost]]], costs: Costs, load: Load) -> None:
        self._stages, self._shape, self._load = stages, costs.shape, load
        self._places, self._free = [0] * len(stages), [0.0] * len(stages)
        self._last: dict[tuple[int, int], tuple[float, float]] = {}
        self._ends: dict[_End, float] = {}
        self._waiting: dict[_End, int] = {}
        hop, link = Action("H", 0, "f", 0), load.links["H"]
        self._hop = load.bytes(hop) / link.attention + link.latency if len(stages) > 1 else 0.0

    def to_the_end(self) -> float:
        ready = list(range(len(self._stages)))
        while ready:
            ready += self._go_on(ready.pop())
        return max(self._reduced(stage) for stage in range(len(self._stages)))

    def _go_on(self, stage: int) -> list[int]:
        """Work on a stage until it has to wait; return the stages that waited for what has been done."""
        woken, slots = list[int](), self._stages[stage]
        while self._places[stage] < len(slots):
            slot, cost = slots[self._places[stage]]
            start = self._free[stage]
            for unit in slot:
                needed = self._needs(unit)
                if needed is not None and needed not in self._ends:
                    self._waiting[needed] = stage
                    return woken
                start = start if needed is None else max(start, self._ends[needed] + self._hop)
            self._places[stage] += 1
            self._free[stage] = end = start + cost.seconds
            for unit in slot:
                if unit.part != "w":
                    key = (unit.part == "f", unit.chunk, unit.micro_batches[0])
                    self._ends[key] = end
                    if key in self._waiting:
                        woken.append(self._waiting.pop(key))
                if unit.part != "f":
                    self._last[unit.chunk, stage] = (start, end)
        return woken

    def _needs(self, unit: Unit) -> _End | None:
        """What another stage, or this one, has to have passed on."""
        if unit.part == "w":
            return None
        forward = unit.part == "f"
        before = unit.chunk - 1 if forward else unit.chunk + 1
        return (forward, before, unit.micro_batches[0]) if 0 <= before < self._shape.chunks else None

    def _reduced(self, stage: int) -> float:
        """When the last reduce of a stage is over: of a chunk they follow its last backward, layer by layer."""
        lane = self._free[stage]
        own = sorted((end, start, chunk) for (chunk, where), (start, end) in self._last.items() if where == stage)
        free = 0.0
        for end, start, chunk in own:
            seconds = [self._reduce(stage, layer) for layer in self._shape.layers_of(chunk)]
            if chunk == self._shape.chunks - 1:
                seconds.append(self._load.reduce(Worker("A", stage), self._shape.layers))
            free = max(max(free, start) + sum(seconds), end + seconds[0])
            lane = max(lane, free)
        return lane

    def _reduce(self, stage: int, layer: int) -> float:
        return sum(self._load.reduce(Worker(role, stage), layer) for role in ROLES)
