"""Orders of computation. Each lists all compute actions so that one machine could execute the list from its start.

A worker's program is the part of that list which it owns. Such programs can't deadlock, whatever the timing: the first
action of the list that is not finished is always the next one of its worker and has all that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from types import MappingProxyType
from typing import Literal

from lightning_afd.errors import PlanError
from lightning_afd.placement import Grouped, Worker
from lightning_afd.schedule.actions import Action, Phase
from lightning_afd.schedule.fill import Pace, fill
from lightning_afd.schedule.passes import place_transfers, spread_in_nodes
from lightning_afd.schedule.shape import Schedule, Shape


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What an order leaves open; each order uses those that it knows."""

    group: int | Literal["auto"] = "auto"
    """Micro-batches that pass a round of the ring one behind the other (G): "auto" is as near to 2P as R allows, a
    number is the most, at least P. More hide longer transfers and hold more activations."""
    pending: int = 8
    """Weight gradients that zero-bubble puts off on one worker, at most."""
    pace: Pace = field(default_factory=Pace)
    """What zero-bubble takes actions to last; stages are equal, unless something better is known."""

    def __post_init__(self) -> None:
        for name in ("group", "pending"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: an order needs at least 1")

    def check(self, cut: Grouped) -> None:
        """Raise PlanError where a run is too short for the ring of the workers of a shape or layout."""
        workers = len(cut.workers())
        if self.group != "auto" and self.group < workers:
            raise PlanError(
                f"group={self.group}: a ring of {workers} workers (groups={cut.groups}) needs at least {workers} "
                "micro-batches in a run"
            )


DEFAULTS = Knobs()
Order = Callable[[Shape, Knobs], Iterable[Action]]


def sequential(shape: Shape, _: Knobs = DEFAULTS) -> list[Action]:
    """Micro-batch after micro-batch, forward then backward: no overlap, the reference."""
    return [action for action in shape.actions() if not action.is_transfer]


def layer_major(shape: Shape, _: Knobs = DEFAULTS) -> list[Action]:
    """All micro-batches of a segment before the next segment, tail forward and backward alternating.

    Optimal for one group: while F computes one micro-batch, A computes another one of the same layer.
    """
    depth = {"f": 0, "b": 1, "w": 1}

    def key(action: Action) -> tuple[int, int, int]:
        if shape.runs_tail(action):
            return 0, shape.layers + 1, action.micro_batch
        way = depth[action.phase]
        return way, -action.layer if way else action.layer, action.micro_batch

    return sorted(sequential(shape), key=key)


@dataclass(frozen=True, kw_only=True)
class _Clock:
    """The slots of af-pipe; in each slot a worker does at most one forward and one backward.

    With p groups of each role, the P = 2p workers A0 F0 A1 F1 ... are the places 0 to P-1 of a ring; a micro-batch
    moves on by one place per slot, its transfer included, and passes layer l in round l // p. A run of `run` >= P
    micro-batches passes round 0, one behind the other, then round 1, and so on; then the next run starts. So the
    forward of the i-th micro-batch of run r in round k at place s has the slot (r rounds + k) run + i + s. At place
    `turn` of the last round (the tail) it turns and runs back the same way; a tail on F is one place further than
    A group 0, which hands over to it.
    With a attention groups and f ffn groups a round has n = lcm(a, f) layers: per micro-batch it takes n/a visits to
    each A worker and n/f to each F worker. If all workers are to be busy all the time, these visits last a/n and f/n
    of a slot, so that a layer takes (a + f)/n slots, a round P = a + f of them, and the rest stays as it is. For
    a = f = p these are the places above. Slots are counted in parts, n to a slot, so that they are whole numbers.
    Each action has a later slot than those that it waits for. Slots of rounds, layers and micro-batches that don't
    exist stay empty: no count has to be a multiple of another.
    """

    rounds: int
    run: int
    parts: int
    """Parts of a slot, and layers of a round (n)."""
    places: int
    """Workers (P): parts of a slot that a layer takes."""
    ahead: int
    """Parts of a slot from a visit to A to that to F (a)."""
    last: tuple[int, int]
    """Round and place of the tail."""

    @classmethod
    def of(cls, shape: Shape, knobs: Knobs) -> _Clock:
        """Runs of nearly equal length, as near to G = 2P as the number of micro-batches allows, or at most `group`.

        A run of P keeps the ring full; the second P is the slack behind which transfers hide.
        """
        knobs.check(shape)
        workers = len(shape.workers())
        if knobs.group == "auto":
            runs = max(1, (shape.micro_batches + workers) // (2 * workers))
        else:
            runs = -(-shape.micro_batches // knobs.group)
        parts, ahead = lcm(shape.attention_groups, shape.ffn_groups), shape.attention_groups
        last = (shape.layers - 1) // parts
        turn = (shape.layers - last * parts) * workers + (ahead if shape.hands_over() else 0)
        return cls(
            rounds=last + 1,
            run=max(workers, -(-shape.micro_batches // runs)),
            parts=parts,
            places=workers,
            ahead=ahead,
            last=(last, turn),
        )

    def place(self, action: Action) -> tuple[int, int]:
        """Round and place of an A or E action, in parts of a slot; what is behind the last layer has its round."""
        round_ = min(action.layer // self.parts, self.rounds - 1)
        ahead = self.ahead if action.op == "E" else 0
        return round_, (action.layer - round_ * self.parts) * self.places + ahead

    def forward(self, round_: int, place: int, m: int) -> int:
        """When a forward is due, in parts of a slot."""
        run, index = divmod(m, self.run)
        return ((run * self.rounds + round_) * self.run + index) * self.parts + place

    def tail(self, m: int) -> int:
        """When the tail is due, forward and backward."""
        return self.forward(*self.last, m)

    def backward(self, round_: int, place: int, m: int) -> int:
        """When a backward is due: as long after the tail as the forward was before it, `run` slots per round."""
        last, turn = self.last
        return self.tail(m) + (last - round_) * self.run * self.parts + turn - place


def af_pipe(shape: Shape, knobs: Knobs = DEFAULTS) -> list[Action]:
    """Interleaved 1F1B over the P workers, in runs of about 2P micro-batches: all actions sorted by their slots."""
    return _by_slots(shape, _Clock.of(shape, knobs), ("f", "b"))


def _by_slots(shape: Shape, clock: _Clock, within: tuple[Phase, Phase]) -> list[Action]:
    """All actions sorted by their slots, the two of a worker's slot in the order `within`."""

    def key(action: Action) -> tuple[int, int]:
        if shape.runs_tail(action):
            return clock.tail(action.micro_batch), 1
        due = clock.forward if action.phase == "f" else clock.backward
        turn = within.index("f" if action.phase == "f" else "b")
        return due(*clock.place(action), action.micro_batch), 2 * turn

    return sorted(sequential(shape), key=key)


def zero_bubble(shape: Shape, knobs: Knobs = DEFAULTS) -> list[Action]:
    """af-pipe with weight gradients put off, so that input gradients pass the ring sooner, and filled into gaps.

    A worker's slot begins with its backward or with its forward, whichever ends the step sooner at the given pace:
    a gradient that comes back early should pass, but a late one (c > F/2) should not keep a forward waiting.
    """
    clock = _Clock.of(shape, knobs)
    forwards_first, backwards_first = (
        fill(shape, _by_slots(shape, clock, within), knobs.pace, knobs.pending) for within in (("f", "b"), ("b", "f"))
    )
    return (forwards_first if forwards_first.end <= backwards_first.end else backwards_first).order


ORDERS: Mapping[str, Order] = MappingProxyType(
    {"sequential": sequential, "layer-major": layer_major, "af-pipe": af_pipe, "zero-bubble": zero_bubble}
)


def build(order: str, shape: Shape, knobs: Knobs = DEFAULTS) -> Schedule:
    """The complete schedule of an order, transfers placed; raises PlanError for an unknown name."""
    if order not in ORDERS:
        raise PlanError(f"order={order!r} is not known: choose one of {', '.join(ORDERS)}")
    between = replace(shape, spreads=False)
    programs: dict[Worker, list[Action]] = {worker: [] for worker in shape.workers()}
    for action in ORDERS[order](between, knobs):
        programs[shape.owner(action)].append(action)
    computation = {worker: tuple(program) for worker, program in programs.items()}
    schedule = place_transfers(Schedule(between, order, computation))
    return spread_in_nodes(schedule) if shape.spreads else schedule


def largest_group(order: str, shape: Shape, fits: Callable[[Schedule], bool], knobs: Knobs = DEFAULTS) -> int:
    """The longest run of micro-batches (G, from 2P down to P) whose schedule fits into memory.

    `fits` judges a schedule, by `in_flight` of its workers for example; raises PlanError where not even P fits.
    """
    workers = len(shape.workers())
    for group in range(2 * workers, workers - 1, -1):
        if fits(build(order, shape, replace(knobs, group=group))):
            return group
    raise PlanError(
        f"runs of {workers} micro-batches, the shortest for {shape.groups} group(s), do not fit into memory: "
        "use fewer groups, smaller micro-batches or recompute"
    )
