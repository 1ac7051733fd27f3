"""Proofs about a schedule before anything runs: complete, in order, free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from lightning_afd.errors import ScheduleError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.passes import Channel, channel_of
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.schedule.together import Together

TRAINING = frozenset("fbw")
EVALUATION = frozenset("f")


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless the programs can be executed, whatever the timing.

    Every action of the shape (of its forward phase, for an evaluation schedule) stands exactly once in each program
    where it belongs, and places for reduce chunks (S) only where their segments belong; with sends that don't block
    and receives that do, all programs come to their end; and on each channel the receives have the order of the sends.
    """
    check_complete(schedule)
    check_executable(schedule)
    check_channels(schedule)


def check_complete(schedule: Schedule) -> None:
    """Raise ScheduleError unless each program holds exactly the actions that belong to its worker, once each."""
    workers = schedule.shape.workers()
    if set(schedule.programs) != set(workers):
        found = " ".join(map(str, schedule.programs))
        raise ScheduleError(
            f"programs for {found or 'nobody'}: the shape has the workers {' '.join(map(str, workers))}"
        )
    phases = {action.phase for program in schedule.programs.values() for action in program}
    if phases not in (TRAINING, EVALUATION):
        found = " ".join(sorted(phases))
        raise ScheduleError(f"phases {found or 'none'}: a schedule has f b w, or f alone for evaluation")
    expected: dict[Worker, set[Action]] = {worker: set() for worker in workers}
    for action in schedule.shape.actions():
        if action.phase in phases:
            for worker in schedule.shape.places(action):
                expected[worker].add(action)
    for worker in workers:
        expected[worker] |= {
            action for action in schedule.programs[worker] if _is_place(schedule.shape, worker, action)
        }
        _check_program(schedule, worker, expected[worker])


def _is_place(shape: Shape, worker: Worker, action: Action) -> bool:
    """Whether an action is a place for reduce chunks of this worker; a program may have any number of them."""
    return action.op == "S" and action.layer <= shape.layers and shape.owner(action) == worker


def _check_program(schedule: Schedule, worker: Worker, expected: set[Action]) -> None:
    seen: set[Action] = set()
    for position, action in enumerate(schedule.programs[worker]):
        if action in seen or action not in expected:
            fault = f"has {action} twice" if action in seen else f"has {action}, which does not belong there"
            places = dict.fromkeys(schedule.programs, position)
            raise ScheduleError(f"{worker} {fault}\n{schedule.grid(places)}")
        seen.add(action)
    if seen != expected:
        raise ScheduleError(_lacks(schedule, worker, sorted(expected - seen, key=str)))


def _lacks(schedule: Schedule, worker: Worker, missing: list[Action]) -> str:
    """The message about missing actions; its place is where the first of them is needed."""
    program, dependencies = schedule.programs[worker], schedule.shape.dependencies
    needed = (place for place, action in enumerate(program) if missing[0] in dependencies(action))
    places = dict.fromkeys(schedule.programs, next(needed, len(program)))
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return f"{worker} lacks {' '.join(map(str, missing[:8]))}{more}\n{schedule.grid(places)}"


def check_executable(schedule: Schedule) -> None:
    """Raise ScheduleError, naming where each worker waits and for what, unless all programs come to their end."""
    run = _Execution(schedule)
    while any([run.advance(worker) for worker in schedule.programs]):
        pass
    stuck = [worker for worker, program in schedule.programs.items() if run.places[worker] < len(program)]
    if stuck:
        sentence = "; ".join(f"{worker} waits at {run.current(worker)} for {run.missing(worker)}" for worker in stuck)
        raise ScheduleError(f"{sentence}\n{schedule.grid(run.places)}")


class _Execution:
    """Programs executed as far as they go, without any notion of time."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.places = dict.fromkeys(schedule.programs, 0)
        self.computed: set[Action] = set()
        self.sent: set[Action] = set()
        self.received: set[Action] = set()

    def current(self, worker: Worker) -> Action:
        return self.schedule.programs[worker][self.places[worker]]

    def advance(self, worker: Worker) -> bool:
        """Go on with one program until it has to wait; whether it moved at all."""
        start, end = self.places[worker], len(self.schedule.programs[worker])
        while self.places[worker] < end and self.missing(worker) is None:
            self.execute(worker)
        return self.places[worker] > start

    def execute(self, worker: Worker) -> None:
        """Go on by one action, which has all that it waits for."""
        action = self.current(worker)
        self._book(worker, action).add(action)
        self.places[worker] += 1

    def missing(self, worker: Worker) -> Action | None:
        """What the current action of a worker still waits for."""
        action = self.current(worker)
        receives = action.is_transfer and not action.is_exchange and self._book(worker, action) is self.received
        if receives and action in self.sent:
            return None
        for before in self.schedule.shape.dependencies(action):
            if before not in (self.received if before.is_transfer else self.computed):
                return before
        return action if receives else None

    def _book(self, worker: Worker, action: Action) -> set[Action]:
        if not action.is_transfer:
            return self.computed
        sends = worker == self.schedule.shape.endpoints(action)[0] and not action.is_exchange
        return self.sent if sends else self.received


def check_together(together: Together) -> None:
    """Raise ScheduleError unless ranks that all run this program come to its end, whatever the timing.

    Each receive stands behind its own send. So the rank that has got least far can always go on: what it waits for is
    sent at a place that all ranks have passed.
    """
    schedule = together.schedule
    check(schedule)
    run = _Execution(schedule)
    for step in together.program:
        missing = run.missing(step.worker)
        if missing is not None:
            raise ScheduleError(f"{step} stands before {missing}, for which it waits\n{schedule.grid(run.places)}")
        run.execute(step.worker)


def check_channels(schedule: Schedule) -> None:
    """Raise ScheduleError unless on each channel the receives have the order of the sends: messages carry no tag."""
    sends: Mapping[Channel, list[Action]] = defaultdict(list)
    receives: Mapping[Channel, list[tuple[Action, int]]] = defaultdict(list)
    for worker, program in schedule.programs.items():
        for position, action in enumerate(program):
            if action.is_transfer and not action.is_exchange:
                channel = channel_of(schedule.shape, action)
                if worker == channel[2]:
                    sends[channel].append(action)
                else:
                    receives[channel].append((action, position))
    for channel, sent in sends.items():
        for expected, (action, position) in zip(sent, receives[channel], strict=True):
            if action != expected:
                *_, sender, receiver = channel
                places = dict.fromkeys(schedule.programs, position)
                raise ScheduleError(
                    f"{receiver} receives {action} where {sender} sends {expected}\n{schedule.grid(places)}"
                )


def in_flight(schedule: Schedule, worker: Worker) -> int:
    """The most (layer, micro-batch) pairs that a worker holds at once, from its forward to its last action on them.

    The last one is the backward on A, the weight gradient on F, the forward itself in an evaluation schedule. This
    is what the schedule needs, and so the default and the least credit.
    """
    computation = [action for action in schedule.programs[worker] if not action.is_transfer and action.op != "S"]
    left = Counter((action.layer, action.micro_batch) for action in computation)
    held: set[tuple[int, int]] = set()
    most = 0
    for action in computation:
        pair = action.layer, action.micro_batch
        held.add(pair)
        most = max(most, len(held))
        left[pair] -= 1
        if not left[pair]:
            held.remove(pair)
    return most
