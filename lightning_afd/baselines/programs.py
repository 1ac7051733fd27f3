"""Programs of collocated stages: units of an order as actions, with all their transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

from lightning_afd.baselines.stages import Stages
from lightning_afd.baselines.units import Slot, Unit
from lightning_afd.placement import Role, Worker
from lightning_afd.schedule.actions import Action, Op, Phase
from lightning_afd.schedule.shape import Schedule

Keys = tuple[tuple[Op, int, Phase], ...]
"""Actions of one micro-batch, without its number."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How the micro-batches of a unit pass a layer."""

    pipelined: bool = False
    """Attention takes its micro-batches one by one, and sends each at once; else all in one go, so that transfers hide
    behind experts only, and with one micro-batch per unit nowhere."""
    split: bool = False
    """Weight gradients follow the sending of input gradients, and may be put off; else they precede it."""


def collocated_schedule(name: str, stages: Stages, style: Style, order: Callable[[int], list[Slot]]) -> Schedule:
    """The schedule in which each stage executes the slots that `order` gives for it."""
    programs: dict[Worker, tuple[Action, ...]] = {}
    for worker in stages.workers():
        slots = (slot_actions(stages, style, slot, worker.role) for slot in order(worker.group))
        programs[worker] = tuple(chain.from_iterable(slots))
    return Schedule(stages, name, programs)


def slot_actions(stages: Stages, style: Style, slot: Slot, role: Role) -> Iterator[Action]:
    """What the A worker or the F worker of a stage does in a slot."""
    steps = _attention if role == "A" else _experts
    return _alternating([steps(stages, style, unit) for unit in slot])


def _alternating(units: list[list[list[Action]]]) -> Iterator[Action]:
    """The actions of units whose steps take turns."""
    for steps in zip_longest(*units, fillvalue=[]):
        yield from chain.from_iterable(steps)


@dataclass(frozen=True)
class _Step:
    """What an A worker does between two receives of one micro-batch."""

    receives: Keys = ()
    computes: Keys = ()
    sends: Keys = ()
    after: Keys = ()

    def actions(self, style: Style, micro_batches: tuple[int, ...]) -> list[Action]:
        parts = (self.receives, self.computes, self.sends, self.after)
        if style.pipelined:
            return [Action(*key, m) for m in micro_batches for part in parts for key in part]
        return [Action(*key, m) for part in parts for m in micro_batches for key in part]


def _attention(stages: Stages, style: Style, unit: Unit) -> list[list[Action]]:
    layers = stages.layers_of(unit.chunk)
    steps = {"f": _forward, "b": _backward, "i": _backward, "w": _weights}[unit.part]
    return [step.actions(style, unit.micro_batches) for step in steps(stages, style, unit, layers)]


def _forward(stages: Stages, _: Style, __: Unit, layers: range) -> Iterator[_Step]:
    first, last = layers[0], layers[-1]
    arrives: Keys = (("H", first - 1, "f"),) if first and stages.hops(first - 1) else ()
    for layer in layers:
        yield _Step(arrives, (("A", layer, "f"),), (("D", layer, "f"),))
        arrives = (("C", layer, "f"),)
    if last + 1 == stages.layers:
        yield _Step(arrives, (("A", last + 1, "f"),))
    else:
        yield _Step(arrives, sends=(("H", last, "f"),))


def _backward(stages: Stages, style: Style, unit: Unit, layers: range) -> Iterator[_Step]:
    first, last = layers[0], layers[-1]
    if last + 1 == stages.layers:
        yield _gradient(stages, style, unit, last + 1, ())
    else:
        yield _Step((("H", last, "b"),), sends=(("D", last, "b"),))
    for layer in reversed(layers):
        yield _gradient(stages, style, unit, layer, (("C", layer, "b"),), hop=layer == first)


def _gradient(stages: Stages, style: Style, unit: Unit, segment: int, receives: Keys, *, hop: bool = False) -> _Step:
    """The backward of a segment, and the gradient that it sends on: to experts, to another stage, or to nobody."""
    sends: Keys = ()
    if segment:
        sends = (("H" if hop else "D", segment - 1, "b"),)
    weights: Keys = ()
    if stages.splits(segment) and unit.part == "b":
        weights = (("A", segment, "w"),)
    inputs: tuple[Op, int, Phase] = ("A", segment, "b")
    return _Step(receives, (inputs,), sends, weights) if style.split else _Step(receives, (inputs, *weights), sends)


def _weights(stages: Stages, _: Style, __: Unit, layers: range) -> Iterator[_Step]:
    tail = [stages.layers] if layers[-1] + 1 == stages.layers else []
    for segment in (*tail, *reversed(layers)):
        yield _Step(computes=(("A", segment, "w"),))


def _experts(stages: Stages, style: Style, unit: Unit) -> list[list[Action]]:
    """The F worker's part, layer by layer and micro-batch by micro-batch."""
    layers = stages.layers_of(unit.chunk)
    names = {
        "f": ("Df", "Ef", "Cf"),
        "b": ("Db", "Eb", "Cb", "Ew") if style.split else ("Db", "Eb", "Ew", "Cb"),
        "i": ("Db", "Eb", "Cb"),
        "w": ("Ew",),
    }[unit.part]
    return [
        [Action(name[0], layer, name[1], m) for m in unit.micro_batches for name in names]  # type: ignore[arg-type]
        for layer in (layers if unit.part == "f" else reversed(layers))
    ]
