"""On GPUs messages stand in queues and a send waits for its receiver: no schedule comes to a stop there either.

A small model of hosts and devices, without any notion of time. A host goes through its program; it waits for the
announcement of what it receives, and before a dispatch until the attention segment is computed. A device computes in
the order of launches; rows of a message move once both hosts have launched it, what they are made of is computed, and
all messages before it in its lane (sender, receiver, channel) have moved.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lightning_afd.placement import Worker
from lightning_afd.runtime import Runtime
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.schedule.passes import channel_of
from lightning_afd.schedule.shape import Shape

SHAPES: list[dict[str, Any]] = [
    {"layers": 3, "micro_batches": 4},
    {"layers": 5, "micro_batches": 5, "groups": 2, "router_logits": True},
    {"layers": 4, "micro_batches": 4, "groups": (1, 2)},
    {"layers": 4, "micro_batches": 3, "groups": (2, 1), "router_logits": True},
    {"layers": 4, "micro_batches": 4, "groups": 2, "head": "ffn"},
]


class Machine:
    """Hosts and devices that go on as far as they can."""

    def __init__(self, shape: Shape, programs: Mapping[Worker, Sequence[Action]]) -> None:
        self.shape = shape
        self.hosts = {worker: deque(program) for worker, program in programs.items()}
        self.launched: dict[Worker, deque[Action]] = {worker: deque() for worker in programs}
        """Computations, and waits for rows, that a device has still to do."""
        self.done: dict[Worker, set[Action]] = {worker: set() for worker in programs}
        self.sent: set[Action] = set()
        self.moved: set[Action] = set()
        self.sends: defaultdict[Any, deque[tuple[Action, tuple[Action, ...]]]] = defaultdict(deque)
        """By lane, each with what the sender's device has to do before."""
        self.posts: defaultdict[Any, deque[Action]] = defaultdict(deque)

    def run(self) -> bool:
        """Whether everything comes to its end."""
        while any([*map(self._host, self.hosts), *map(self._device, self.hosts), *map(self._lane, list(self.sends))]):
            pass
        return not any([*self.hosts.values(), *self.launched.values(), *self.sends.values(), *self.posts.values()])

    def _host(self, worker: Worker) -> bool:
        program = self.hosts[worker]
        if not program or not self._may_launch(worker, program[0]):
            return False
        action = program.popleft()
        if not action.is_transfer:
            self.launched[worker].append(action)
        elif self.shape.receives(worker, action):
            self.posts[channel_of(self.shape, action)].append(action)
            self.launched[worker].append(action)
        else:
            # A dispatch is packed beside later computations, anything else behind all that has been launched.
            before = self._before_dispatch(action) or tuple(self.launched[worker])
            self.sends[channel_of(self.shape, action)].append((action, before))
            self.sent.add(action)
        return True

    def _before_dispatch(self, action: Action) -> tuple[Action, ...]:
        return self.shape.dependencies(action) if (action.op, action.phase) == ("D", "f") else ()

    def _may_launch(self, worker: Worker, action: Action) -> bool:
        if action.is_transfer and self.shape.receives(worker, action):
            return action in self.sent
        return self.done[worker].issuperset(self._before_dispatch(action))

    def _device(self, worker: Worker) -> bool:
        queue = self.launched[worker]
        if not queue or (queue[0].is_transfer and queue[0] not in self.moved):
            return False
        self.done[worker].add(queue.popleft())
        return True

    def _lane(self, lane: Any) -> bool:
        sends, posts = self.sends[lane], self.posts[lane]
        if not sends or not posts or sends[0][0] != posts[0]:
            return False
        action, before = sends[0]
        if not self.done[self.shape.endpoints(action)[0]].issuperset(before):
            return False
        self.moved.add(action)
        sends.popleft()
        posts.popleft()
        return True


def launches(program: Sequence[Action], worker: Worker) -> list[Action]:
    """The order in which a host launches, each dispatch having to wait for its counts."""
    runtime = Runtime(0, {})
    runtime.would_wait = lambda action: (action.op, action.phase) == ("D", "f")
    return [step.action for step in runtime._in_order([Step(worker, action) for action in program])]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_queues_of_devices_come_to_their_end(sizes: dict[str, Any], order: str, late: bool) -> None:
    shape = Shape(**sizes)
    programs = build(order, shape).programs
    if late:
        programs = {worker: launches(program, worker) for worker, program in programs.items()}
    assert Machine(shape, programs).run()


def test_receives_in_another_order_than_the_sends_come_to_a_stop() -> None:
    shape = Shape(layers=3, micro_batches=4)
    programs = {worker: list(program) for worker, program in build("layer-major", shape).programs.items()}
    ffn = programs[Worker("F", 0)]
    first, second = (ffn.index(Action("D", 0, "f", m)) for m in (0, 1))
    ffn[first], ffn[second] = ffn[second], ffn[first]
    assert not Machine(shape, programs).run()
