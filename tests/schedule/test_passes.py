import dataclasses

import pytest

from lightning_afd.errors import ScheduleError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.check import check
from lightning_afd.schedule.orders import build
from lightning_afd.schedule.passes import forward_only, in_blocks, place_transfers
from lightning_afd.schedule.shape import Schedule, Shape

A0, F0 = Worker("A", 0), Worker("F", 0)


def program(names: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, names.split()))


def names(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def test_messages_sent_earlier_are_received_earlier() -> None:
    """F works in another order than A: it has to take D0f0 off the channel before D0f1."""
    shape = Shape(layers=1, micro_batches=2)
    attention = "A0f0 A0f1 A1f0 A1b0 A1f1 A1b1 A0b0 A0b1"
    experts = "E0f1 E0f0 E0b0 E0w0 E0b1 E0w1"
    placed = place_transfers(Schedule(shape, "by hand", {A0: program(attention), F0: program(experts)}))
    assert names(placed.programs[F0])[:30] == "D0f0 D0f1 E0f1 C0f1 E0f0 C0f0 "
    assert names(placed.programs[A0])[20:45] == "C0f1 C0f0 A1f0 A1b0 D0b0 "
    check(placed)


def test_data_that_nobody_produces_is_an_error() -> None:
    shape = Shape(layers=1, micro_batches=1)
    with pytest.raises(ScheduleError, match="C0f0 is needed but never sent"):
        place_transfers(Schedule(shape, "by hand", {A0: program("A0f0 A1f0"), F0: ()}))


def test_forward_only_keeps_the_forward_phase_and_its_order() -> None:
    schedule = build("sequential", Shape(layers=2, micro_batches=2))
    forward = forward_only(schedule)
    assert names(forward.programs[F0]) == "D0f0 E0f0 C0f0 D1f0 E1f0 C1f0 D0f1 E0f1 C0f1 D1f1 E1f1 C1f1"
    assert forward == forward_only(forward)
    assert forward.digest() != schedule.digest()
    assert dataclasses.replace(forward, programs=schedule.programs) == schedule


def test_blocks_receive_before_and_send_after() -> None:
    schedule = in_blocks(build("layer-major", Shape(layers=2, micro_batches=2)))
    assert names(schedule.programs[A0]) == (
        "A0f0 A0f1 D0f0 D0f1 C0f0 C0f1 A1f0 A1f1 D1f0 D1f1 C1f0 A2f0 A2b0 D1b0 C1f1 A2f1 A2b1 D1b1 "
        "C1b0 C1b1 A1b0 A1b1 D0b0 D0b1 C0b0 C0b1 A0b0 A0b1"
    )
    assert schedule.programs[F0] == build("layer-major", Shape(layers=2, micro_batches=2)).programs[F0]


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_blocks_of_layer_major_can_be_executed(groups: int, micro_batches: int) -> None:
    for logits in (False, True):
        shape = Shape(layers=4, groups=groups, micro_batches=micro_batches, router_logits=logits)
        check(in_blocks(build("layer-major", shape)))
