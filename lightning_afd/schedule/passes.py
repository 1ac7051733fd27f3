"""Passes over schedules: each takes a Schedule and returns a new one."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lightning_afd.errors import ScheduleError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action, Op, Phase, Step
from lightning_afd.schedule.shape import Schedule, Shape

Channel = tuple[str, str, Worker, Worker]
"""Op, phase, sender, receiver: messages of one channel are matched by their order."""


def channel_of(shape: Shape, action: Action) -> Channel:
    """The channel on which a transfer travels."""
    return (action.op, action.phase, *shape.endpoints(action))


def place_transfers(schedule: Schedule) -> Schedule:
    """Complete a schedule of compute actions: each send directly after the action that produces its data, each receive
    directly before the first action that needs it.

    Where the receiver needs the messages of a channel in another order than they are sent, those sent earlier are
    received first, so that the order of receives is that of the sends.
    """
    shape = schedule.shape
    sends = _sends_by_producer(shape)
    queues: dict[Channel, deque[Action]] = defaultdict(deque)
    for program in schedule.programs.values():
        for action in program:
            for transfer in sends[action]:
                queues[channel_of(shape, transfer)].append(transfer)
    programs = {}
    for worker, program in schedule.programs.items():
        received: set[Action] = set()
        placed: list[Action] = []
        for action in program:
            for before in shape.dependencies(action):
                if before.is_transfer and before not in received:
                    placed += _take(queues[channel_of(shape, before)], before, received)
            placed += (action, *sends[action])
        programs[worker] = tuple(placed)
    return replace(schedule, programs=programs)


def spread_in_nodes(schedule: Schedule) -> Schedule:
    """Let F workers spread the rows of a dispatch inside their nodes (X) as soon as it has come, and gather the sums
    there (Y) before they are sent back.

    In an exchange each rank sends before it waits for the others, which run the same program. So where a worker as a
    whole can go on, each of its ranks can: programs with exchanges are as free of deadlock as without.
    """
    programs = dict(schedule.programs)
    for worker, program in schedule.programs.items():
        if worker.role == "F":
            programs[worker] = tuple(step for action in program for step in _with_exchange(action))
    return replace(schedule, shape=replace(schedule.shape, spreads=True), programs=programs)


def _with_exchange(action: Action) -> tuple[Action, ...]:
    """An action of an F worker, and the exchange behind or before it."""
    if action.op == "D":
        return action, replace(action, op="X")
    return (replace(action, op="Y"), action) if action.op == "C" else (action,)


def _sends_by_producer(shape: Shape) -> dict[Action, list[Action]]:
    """For each compute action the transfers that carry its result away, the one that others wait for most first."""
    sends: dict[Action, list[Action]] = defaultdict(list)
    for action in shape.actions():
        if action.is_transfer:
            (producer,) = shape.dependencies(action)
            sends[producer].append(action)
    return sends


def _take(queue: deque[Action], wanted: Action, received: set[Action]) -> list[Action]:
    """Take messages from a channel up to the wanted one."""
    taken = []
    while wanted not in received:
        if not queue:
            raise ScheduleError(f"{wanted} is needed but never sent: the schedule lacks the action that produces it")
        taken.append(queue.popleft())
        received.add(taken[-1])
    return taken


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the forward phase alone, for evaluation."""
    programs = {
        worker: tuple(action for action in program if action.phase == "f")
        for worker, program in schedule.programs.items()
    }
    return replace(schedule, programs=programs)


def place_reduces(schedule: Schedule) -> Schedule:
    """Give A workers the places (S) where chunks of their gradients may start to be summed over data replicas.

    They begin behind the last backward (or weight gradient) of a segment, stand before each receive, when all that is
    ready has been sent and the worker would wait, and one ends the program. Nothing else changes, so a program with
    places is as free of deadlock as without. How many chunks there are is not known here: the places are the same for
    any chunk size, and on all ranks of a worker.
    """
    programs = dict(schedule.programs)
    for worker, program in schedule.programs.items():
        if worker.role == "A":
            placed = with_places(schedule.shape, [Step(worker, action) for action in program])
            programs[worker] = tuple(step.action for step in placed)
    return replace(schedule, programs=programs)


def with_places(shape: Shape, program: Sequence[Step]) -> tuple[Step, ...]:
    """The same for the program of a rank with attention, which may have experts, too."""
    return tuple(_with_places(shape, program)) if program else ()


def _with_places(shape: Shape, program: Sequence[Step]) -> Iterator[Step]:
    worker = next(step.worker for step in program if step.worker.role == "A")
    lasts = [step.action.layer for step in program if _completes(shape, step.action)]
    missing, segments = Counter(lasts), sorted(set(lasts))
    number: Counter[int] = Counter()
    moved = False
    for step in program:
        receives = shape.receives(step.worker, step.action)
        if receives and moved and not missing[segments[-1]]:
            yield Step(worker, _place(shape, segments, missing, number))
        moved = not receives
        yield step
        if _completes(shape, step.action):
            missing[step.action.layer] -= 1
    yield Step(worker, _place(shape, segments, missing, number))


def _completes(shape: Shape, action: Action) -> bool:
    """Whether an action is one of those that complete the weight gradients of an attention segment."""
    return action.op == "A" and action.phase == _last_phase(shape, action.layer)


def _last_phase(shape: Shape, segment: int) -> str:
    """The phase that completes the weight gradients of an attention segment."""
    return "w" if shape.splits(segment) else "b"


def _place(shape: Shape, segments: list[int], missing: Counter[int], number: Counter[int]) -> Action:
    """The next place for chunks of the segments that are complete, counted from the last one."""
    complete = segments[-1]
    for segment in reversed(segments):
        if missing[segment]:
            break
        complete = segment
    number[complete] += 1
    return Action("S", complete, "b", number[complete] - 1)


def in_blocks(schedule: Schedule) -> Schedule:
    """Let A workers compute each segment for all micro-batches that follow one another in one go: they receive all
    that it needs before, and send all of it after.

    The micro-batches of such a schedule are chunks of the experts' work alone, as in systems that hide transfers
    behind experts but not behind attention.
    """
    shape = schedule.shape
    programs = dict(schedule.programs)
    for worker in programs:
        if worker.role == "A":
            programs[worker] = tuple(_blocks(shape, worker, schedule.programs[worker]))
    return replace(schedule, programs=programs)


def _blocks(shape: Shape, worker: Worker, program: tuple[Action, ...]) -> list[Action]:
    blocks: list[Action] = []
    for _, group in groupby(pieces(shape, worker, program), key=lambda piece: _segment(piece.action)):
        blocks += in_one_go(list(group))
    return blocks


def _segment(action: Action) -> tuple[Op, int, Phase]:
    return action.op, action.layer, action.phase


@dataclass(frozen=True)
class Piece:
    """A compute action of a program, and the transfers around it."""

    receives: tuple[Action, ...]
    """Between the compute action before and this one."""
    action: Action
    sends: tuple[Action, ...]
    """Between this compute action and the next one."""


def pieces(shape: Shape, worker: Worker, program: Iterable[Action]) -> list[Piece]:
    """Cut the program of a worker at its compute actions."""
    found: list[Piece] = []
    came: tuple[Action, ...] = ()
    for action in program:
        if not action.is_transfer:
            found.append(Piece(came, action, ()))
            came = ()
        elif shape.endpoints(action)[0] == worker:
            found[-1] = replace(found[-1], sends=(*found[-1].sends, action))
        else:
            came += (action,)
    return found


def in_one_go(block: Sequence[Piece]) -> list[Action]:
    """All receives of some pieces, then what they compute, then all sends."""
    return [
        *(action for piece in block for action in piece.receives),
        *(piece.action for piece in block),
        *(action for piece in block for action in piece.sends),
    ]
