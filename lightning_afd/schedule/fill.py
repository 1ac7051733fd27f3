"""Weight gradients as fillers: list scheduling of an order at a given pace."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from lightning_afd.errors import PlanError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Shape

_UNITS = {"Af": 1.0, "Ab": 1.0, "Aw": 1.0, "Ef": 1.0, "Eb": 1.0, "Ew": 1.0, "Tf": 0.0, "Tb": 0.0, "Tw": 0.0}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long the actions of a step are taken to last, in any unit; a schedule is correct at any other pace, too."""

    seconds: Mapping[str, float] = field(default_factory=lambda: dict(_UNITS))
    """By op and phase, T for the tail wherever it runs."""
    transfer: float = 0.5
    """From the end of an action to the start of what waits for it on another worker."""

    def __post_init__(self) -> None:
        missing = sorted(_UNITS.keys() - self.seconds.keys())
        if missing or self.transfer < 0 or min(self.seconds.values()) < 0:
            raise PlanError(f"a pace needs times >= 0 of {' '.join(_UNITS)}, but lacks {' '.join(missing) or 'none'}")

    def of(self, shape: Shape, action: Action) -> float:
        """Duration of a compute action; a backward that is not split lasts as long as its two parts."""
        if action.op == "A" and action.layer == shape.layers and shape.hands_over():
            return 0
        op = "T" if shape.runs_tail(action) else action.op
        if op != "E" and action.phase == "b" and not (action.op == "A" and shape.splits(action.layer)):
            return self.seconds[op + "b"] + self.seconds[op + "w"]
        return self.seconds[op + action.phase]


def place_of(worker: Worker) -> int:
    """Position of a worker in the ring A0 F0 A1 F1 ..., where the roles may end at different numbers."""
    return 2 * worker.group + (worker.role == "F")


@dataclass(frozen=True)
class Filled:
    """An order with its gaps filled."""

    order: list[Action]
    end: float
    """When its last action ends at the pace that it was made for."""


def fill(shape: Shape, order: Iterable[Action], pace: Pace, pending: int) -> Filled:
    """Move the weight gradients of an order to where their worker would wait, or has put off as many as it may.

    Each worker keeps the order of its forwards and backwards; a tail runs as soon as it can. The last backward of the
    step still has to pass s places after place s, each with its transfer: as long as 2s weight gradients at most if a
    transfer takes no longer than they do. So place s keeps up to 2s + 1 of them, or `pending` if that is less.
    The result can be executed from its start like any order: it is sorted by times at which all inputs were there.
    """
    filling = _Filling(shape, order, pace, pending)
    found = filling.to_the_end()
    return Filled(found, filling.end)


class _Queues:
    """What a worker still has to do, each part in its order."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tail: deque[Action] = deque()
        self.main: deque[Action] = deque()
        self.pending: deque[Action] = deque()
        self.free: float = 0


class _Filling:
    def __init__(self, shape: Shape, order: Iterable[Action], pace: Pace, pending: int) -> None:
        self._shape = shape
        self._pace = pace
        self._ends: dict[Action, float] = {}
        self._weights: dict[tuple[Action, ...], Action] = {}
        self._inputs: dict[Action, tuple[Action, ...]] = {}
        self._readers: dict[Action, list[Worker]] = defaultdict(list)
        self._workers = {worker: _Queues(min(pending, self._most(worker))) for worker in shape.workers()}
        for action in order:
            self._enlist(action)

    def _most(self, worker: Worker) -> int:
        """Weight gradients that the drain of the pipeline has time for, and one so that a tail never waits for it."""
        tail = worker == self._shape.tail and self._shape.splits(self._shape.layers)
        return 2 * place_of(worker) + 1 + tail

    def _enlist(self, action: Action) -> None:
        owner, inputs = self._shape.owner(action), self._shape.producers(action)
        if action.phase == "w":
            self._weights[inputs] = action
            return
        self._inputs[action] = inputs
        for before in inputs:
            self._readers[before].append(owner)
        queues = self._workers[owner]
        (queues.tail if self._shape.runs_tail(action) else queues.main).append(action)

    @property
    def end(self) -> float:
        return max(queues.free for queues in self._workers.values())

    def to_the_end(self) -> list[Action]:
        found: list[Action] = []
        wakes = [(0.0, place_of(worker), worker) for worker in self._workers]
        while wakes:
            now, _, worker = heappop(wakes)
            if self._workers[worker].free > now:
                continue
            action = self._choose(self._workers[worker], worker, now)
            if action is not None:
                found.append(action)
                for reader, time in self._execute(worker, action, now):
                    heappush(wakes, (time, place_of(reader), reader))
        return found

    def _choose(self, queues: _Queues, worker: Worker, now: float) -> Action | None:
        """Tails first, then the next in order; a weight gradient if that can't start, or too many are put off."""
        for queue in (queues.tail, queues.main):
            if len(queues.pending) < queues.most and queue and self._may_start(queue[0], worker, now):
                return queue.popleft()
        return queues.pending.popleft() if queues.pending else None

    def _may_start(self, action: Action, worker: Worker, now: float) -> bool:
        ends, transfer = self._ends, self._pace.transfer
        for before in self._inputs[action]:
            if before not in ends or ends[before] + (transfer if self._shape.owner(before) != worker else 0) > now:
                return False
        return True

    def _execute(self, worker: Worker, action: Action, now: float) -> list[tuple[Worker, float]]:
        """Book an action; returns who may have something to do when."""
        queues = self._workers[worker]
        end = queues.free = self._ends[action] = now + self._pace.of(self._shape, action)
        weight = self._weights.get((action,))
        if weight is not None:
            queues.pending.append(weight)
        readers = {reader for reader in self._readers[action] if reader != worker}
        return [(worker, end), *((reader, end + self._pace.transfer) for reader in readers)]
