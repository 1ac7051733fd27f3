"""Passes over schedules: each takes a Schedule and returns a new one."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from lightning_afd.errors import ScheduleError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
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
    shape = schedule.shape
    programs = dict(schedule.programs)
    for worker, program in schedule.programs.items():
        if worker.role == "A" and program:
            programs[worker] = tuple(_with_places(shape, worker, program))
    return replace(schedule, programs=programs)


def _with_places(shape: Shape, worker: Worker, program: tuple[Action, ...]) -> Iterator[Action]:
    missing = Counter(a.layer for a in program if a.op == "A" and a.phase == _last_phase(shape, a.layer))
    segments = sorted(missing)
    number: Counter[int] = Counter()
    moved = False
    for action in program:
        receives = action.is_transfer and shape.endpoints(action)[0] != worker
        if receives and moved and not missing[segments[-1]]:
            yield _place(shape, segments, missing, number)
        moved = not receives
        yield action
        if action.op == "A" and action.phase == _last_phase(shape, action.layer):
            missing[action.layer] -= 1
    yield _place(shape, segments, missing, number)


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
    sends: dict[Action, list[Action]] = defaultdict(list)
    receives: dict[Action, list[Action]] = defaultdict(list)
    came: list[Action] = []
    computed: list[Action] = []
    for action in program:
        if not action.is_transfer:
            receives[action], came = came, []
            computed.append(action)
        elif shape.endpoints(action)[0] == worker:
            sends[computed[-1]].append(action)
        else:
            came.append(action)
    for _, group in groupby(computed, key=lambda action: (action.op, action.layer, action.phase)):
        block = list(group)
        for part in (receives, None, sends):
            blocks += block if part is None else [transfer for action in block for transfer in part[action]]
    return blocks
