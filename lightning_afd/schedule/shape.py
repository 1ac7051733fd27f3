"""What one optimizer step has to do: the actions, who does them, and the only statement of what each waits for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from lightning_afd.errors import PlanError
from lightning_afd.placement import Grouped, Groups, Head, Worker, as_groups, tail_worker
from lightning_afd.schedule.actions import Action, Op, Phase


@dataclass(frozen=True, kw_only=True)
class Shape(Grouped):
    """The size of a step. A group g owns the attention of the MoE layers l with l mod a == g, F group g the experts of
    those with l mod f == g, where (a, f) are the groups of the roles.

    Segment l < layers leads from the experts of layer l-1 to the dispatch of layer l; segment `layers` is the tail
    (trailing layers, norm, head, loss). With the tail on F ranks (T), A group 0 keeps of that segment only h = base + y
    and its gradient: it passes h on by the hop H behind the last layer.
    """

    layers: int
    """MoE layers (L)."""
    groups: Groups = 1
    """Groups of each role (p), or (attention, ffn)."""
    micro_batches: int
    """Micro-batches per step and A rank (R)."""
    router_logits: bool = False
    """Whether the loss needs the router logits of all layers."""
    head: Head = "attention"
    """Role of the worker that runs the tail."""
    split_attention: bool = False
    """Whether the weight gradients of attention segments are actions of their own (A..w)."""
    spreads: bool = False
    """Whether F ranks spread and gather rows inside their nodes (X and Y exist)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", as_groups(self.groups))
        for name in ("layers", "micro_batches"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: a schedule needs at least 1")

    def attention(self, segment: int) -> Worker:
        """The A worker of a segment, 0 to `layers`."""
        return self._attention[segment]

    @cached_property
    def _attention(self) -> tuple[Worker, ...]:
        groups = (*(segment % self.attention_groups for segment in range(self.layers)), 0)
        return tuple(Worker("A", group) for group in groups)

    @cached_property
    def tail(self) -> Worker:
        """The worker that runs trailing layers, norm, head and loss."""
        return tail_worker(self.head, self.ffn_groups)

    def experts(self, layer: int) -> Worker:
        """The F worker of a layer."""
        return self._experts[layer]

    @cached_property
    def _experts(self) -> tuple[Worker, ...]:
        return tuple(Worker("F", layer % self.ffn_groups) for layer in range(self.layers + 1))

    def owner(self, action: Action) -> Worker:
        """The worker that computes an A, E or T action, or reduces (S)."""
        if action.op == "T":
            return self.tail
        return self.experts(action.layer) if action.op == "E" else self.attention(action.layer)

    def endpoints(self, action: Action) -> tuple[Worker, Worker]:
        """Sender and receiver of a transfer, the same worker for X and Y."""
        layer, forward = action.layer, action.phase == "f"
        before, experts = self.attention(layer), self.experts(layer)
        after = self.tail if layer == self.layers else self.attention(layer + 1)
        if action.op == "D":
            return (before if forward else after), experts
        if action.op == "C":
            return experts, (after if forward else before)
        if action.is_exchange:
            return experts, experts
        other = after if action.op == "H" else self.tail
        return (before, other) if forward else (other, before)

    def receives(self, worker: Worker, action: Action) -> bool:
        """Whether an action is a transfer to a worker."""
        return action.is_transfer and self.endpoints(action)[1] == worker

    def places(self, action: Action) -> tuple[Worker, ...]:
        """The workers whose programs contain an action: its owner, or sender and receiver."""
        return self.endpoints(action) if action.is_transfer else (self.owner(action),)

    def hops(self, layer: int) -> bool:
        """Whether the base changes its A worker from segment `layer` to the next one (H exists)."""
        return self.attention(layer) != self.attention(layer + 1)

    def hands_over(self) -> bool:
        """Whether the tail is run by F ranks (T exists, and H behind the last layer)."""
        return self.tail.role == "F"

    def runs_tail(self, action: Action) -> bool:
        """Whether an action is the forward or backward of the tail."""
        return action.layer == self.layers and action.op == ("T" if self.hands_over() else "A")

    def splits(self, segment: int) -> bool:
        """Whether an attention segment has weight gradients of its own (Aw exists)."""
        return self.split_attention and (segment < self.layers or not self.hands_over())

    def sends_logits(self, layer: int) -> bool:
        """Whether the router logits of a layer travel to the tail (L exists)."""
        return self.router_logits and self.attention(layer) != self.tail

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """What must be finished before an action may start: the dependency rule, stated only here."""
        layer, m = action.layer, action.micro_batch
        match action.op + action.phase:
            case "Af":
                return self._before_forward(layer, m)
            case "Ab":
                return self._before_backward(layer, m)
            case "Df" | "Hf" | "Lf":
                return (Action("A", layer, "f", m),)
            case "Hb" if layer == self.layers:
                return (self._tail("b", m),)
            case "Db" | "Hb":
                return (Action("A", layer + 1, "b", m),)
            case "Lb":
                return (self._tail("b", m),)
            case "Tf":
                return (Action("H", layer, "f", m), *self._logits(m))
            case "Tb":
                return (self._tail("f", m),)
            case "Xf" | "Xb" if self.spreads:
                return (Action("D", layer, action.phase, m),)
            case "Ef":
                return (self._rows(layer, "f", m),)
            case "Eb":
                return (self._rows(layer, "b", m), Action("E", layer, "f", m))
            case "Yf" | "Yb" if self.spreads:
                return (Action("E", layer, action.phase, m),)
            case "Cf" | "Cb":
                return (Action("Y" if self.spreads else "E", layer, action.phase, m),)
            case "Ew":
                return (Action("E", layer, "b", m),)
            case "Aw" if self.splits(layer):
                return (Action("A", layer, "b", m),)
            case "Sb" if m > 0:
                return (Action("S", layer, "b", m - 1),)
            case "Sb" if layer <= self.layers:
                return tuple(self._gradients_from(layer))
        raise ValueError(f"{action} has no meaning: op {action.op!r} has no phase {action.phase!r}")

    def _rows(self, layer: int, phase: Phase, m: int) -> Action:
        """What brings experts their rows."""
        return Action("X" if self.spreads else "D", layer, phase, m)

    def _before_forward(self, segment: int, m: int) -> tuple[Action, ...]:
        if segment == 0:
            return ()
        inputs = (Action("C", segment - 1, "f", m), self._base(segment - 1, "f", m))
        return inputs if segment < self.layers or self.hands_over() else inputs + self._logits(m)

    def _before_backward(self, segment: int, m: int) -> tuple[Action, ...]:
        own = Action("A", segment, "f", m)
        if segment == self.layers:
            return (own, Action("H", segment, "b", m)) if self.hands_over() else (own,)
        gradients = (own, Action("C", segment, "b", m), self._base(segment, "b", m))
        return (*gradients, Action("L", segment, "b", m)) if self.sends_logits(segment) else gradients

    def _logits(self, m: int) -> tuple[Action, ...]:
        return tuple(Action("L", layer, "f", m) for layer in range(self.layers) if self.sends_logits(layer))

    def _gradients_from(self, segment: int) -> Iterator[Action]:
        """The last actions on the gradients of a segment and of those behind it on the same worker.

        Each backward has waited for those of the segments behind; only weight gradients may have been put off.
        """
        behind = range(segment, self.layers + 1) if self.split_attention else (segment,)
        for other in behind:
            if self.attention(other) == self.attention(segment):
                phase: Phase = "w" if self.splits(other) else "b"
                yield from (Action("A", other, phase, m) for m in range(self.micro_batches))

    def _tail(self, phase: Phase, m: int) -> Action:
        """The action that runs the tail."""
        return Action("T" if self.hands_over() else "A", self.layers, phase, m)

    def _base(self, layer: int, phase: Phase, m: int) -> Action:
        """What brings the base over layer `layer`: a hop, or the neighbouring segment on the same worker."""
        if self.hops(layer):
            return Action("H", layer, phase, m)
        return Action("A", layer if phase == "f" else layer + 1, phase, m)

    def producers(self, action: Action) -> tuple[Action, ...]:
        """The compute actions that an action waits for, looked at through the transfers."""
        found: list[Action] = []
        for before in self.dependencies(action):
            found.extend(self.producers(before) if before.is_transfer else (before,))
        return tuple(found)

    def actions(self) -> Iterator[Action]:
        """Every action once, each after those that it waits for: micro-batch after micro-batch."""
        for m in range(self.micro_batches):
            for layer in range(self.layers):
                yield from self._forward(layer, m)
            yield Action("A", self.layers, "f", m)
            if self.hands_over():
                yield from (Action(op, self.layers, phase, m) for op, phase in _HANDED_OVER)
            yield from self._segment_backward(self.layers, m)
            for layer in reversed(range(self.layers)):
                yield from self._backward(layer, m)

    def _forward(self, layer: int, m: int) -> Iterator[Action]:
        yield Action("A", layer, "f", m)
        yield Action("D", layer, "f", m)
        if self.hops(layer):
            yield Action("H", layer, "f", m)
        if self.sends_logits(layer):
            yield Action("L", layer, "f", m)
        yield from self._experts_and_back(layer, "f", m)

    def _backward(self, layer: int, m: int) -> Iterator[Action]:
        yield Action("D", layer, "b", m)
        if self.hops(layer):
            yield Action("H", layer, "b", m)
        if self.sends_logits(layer):
            yield Action("L", layer, "b", m)
        yield from self._experts_and_back(layer, "b", m)
        yield Action("E", layer, "w", m)
        yield from self._segment_backward(layer, m)

    def _experts_and_back(self, layer: int, phase: Phase, m: int) -> Iterator[Action]:
        ops: tuple[Op, ...] = ("X", "E", "Y", "C") if self.spreads else ("E", "C")
        yield from (Action(op, layer, phase, m) for op in ops)

    def _segment_backward(self, segment: int, m: int) -> Iterator[Action]:
        yield Action("A", segment, "b", m)
        if self.splits(segment):
            yield Action("A", segment, "w", m)


_HANDED_OVER: tuple[tuple[Op, Phase], ...] = (("H", "f"), ("T", "f"), ("T", "b"), ("H", "b"))


@dataclass(frozen=True)
class Schedule:
    """One program per worker group. A transfer stands in two programs as the same action: in the sender's it starts
    the asynchronous send, in the receiver's it waits for the arrival."""

    shape: Shape
    order: str
    """Name of the order that built it."""
    programs: Mapping[Worker, tuple[Action, ...]]
    """What each worker does, in its order."""

    def text(self) -> str:
        """The whole schedule as text: shape and order, then one line per worker."""
        sizes = " ".join(f"{field.name}={getattr(self.shape, field.name)}" for field in fields(self.shape))
        lines = (f"{worker}: {' '.join(map(str, self.programs[worker]))}" for worker in sorted(self.programs))
        return "\n".join((f"{self.order} {sizes}", *lines))

    def digest(self) -> str:
        """A hash of everything in it, equal on all ranks that hold the same plan."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def grid(self, places: Mapping[Worker, int] | None = None, around: int = 4) -> str:
        """One line per worker with its actions in columns.

        With `places` (position in each program) only `around` actions before and after them, the places below one
        another and in brackets.
        """
        width = max((len(str(action)) for program in self.programs.values() for action in program), default=0) + 2
        lines = []
        for worker, program in self.programs.items():
            place = None if places is None else places[worker]
            cells = _cells(program, place, around)
            lines.append(f"{worker!s:>3} |{''.join(cell.center(width) for cell in cells)}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.grid()


def _cells(program: tuple[Action, ...], place: int | None, around: int) -> list[str]:
    """The names of a program, or of the window around a place; beyond its ends the cells are empty, then `end`."""
    if place is None:
        return [str(action) for action in program]
    cells = []
    for position in range(place - around, place + around + 1):
        inside = 0 <= position < len(program)
        cell = str(program[position]) if inside else "end" if position == len(program) else ""
        cells.append(f"[{cell}]" if position == place else cell)
    return cells
