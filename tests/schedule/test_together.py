"""One program for all ranks of a collocated layout: complete, in order, and free of deadlock whoever is slow."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lightning_afd.errors import PlanError, ScheduleError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.schedule.check import check_together
from lightning_afd.schedule.shape import Shape
from lightning_afd.schedule.together import TOGETHER_ORDERS, Together, build_together, forward_only_together

A0, F0 = Worker("A", 0), Worker("F", 0)


def names(together: Together) -> str:
    return (
        " ".join(map(str, together.program))
        .replace("A0:D", ">D")
        .replace("F0:C", ">C")
        .replace("A0:", "")
        .replace("F0:", "")
    )


@pytest.mark.parametrize("order", TOGETHER_ORDERS)
@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
def test_every_order_is_complete_and_can_be_executed(order: str, layers: int, micro_batches: int) -> None:
    together = build_together(order, Shape(layers=layers, micro_batches=micro_batches))
    check_together(together)
    check_together(forward_only_together(together))


def test_what_travels_behind_what() -> None:
    """`>D0f1` sends, `D0f1` receives. Sequential hides nothing; experts-only nothing behind attention."""
    shape = Shape(layers=1, micro_batches=2)
    found = {order: names(forward_only_together(build_together(order, shape))) for order in TOGETHER_ORDERS}
    assert found == {
        "sequential": "A0f0 >D0f0 D0f0 E0f0 >C0f0 C0f0 A1f0 A0f1 >D0f1 D0f1 E0f1 >C0f1 C0f1 A1f1",
        "experts-only": "A0f0 A0f1 >D0f0 >D0f1 D0f0 E0f0 >C0f0 D0f1 E0f1 >C0f1 C0f0 C0f1 A1f0 A1f1",
        "flowmoe": "A0f0 >D0f0 A0f1 >D0f1 D0f0 E0f0 >C0f0 D0f1 E0f1 >C0f1 C0f0 A1f0 C0f1 A1f1",
    }


def test_sequential_waits_for_gradients_behind_both_parts_of_the_experts_backward() -> None:
    program = names(build_together("sequential", Shape(layers=1, micro_batches=1)))
    assert program.endswith("A1b0 >D0b0 D0b0 E0b0 E0w0 >C0b0 C0b0 A0b0")


def test_a_tail_runs_back_at_once_so_that_one_is_held() -> None:
    program = names(build_together("flowmoe", Shape(layers=1, micro_batches=2)))
    assert "C0f0 A1f0 A1b0 >D0b0 C0f1 A1f1 A1b1 >D0b1 D0b0" in program


def test_a_receive_before_its_send_is_found() -> None:
    together = build_together("flowmoe", Shape(layers=2, micro_batches=2))
    program = list(together.program)
    send, receive = Step.parse("A0:D1f0"), Step.parse("F0:D1f0")
    program.remove(receive)
    program.insert(program.index(send), receive)
    with pytest.raises(ScheduleError, match="F0:D1f0 stands before D1f0, for which it waits"):
        check_together(dataclasses.replace(together, program=tuple(program)))


def test_a_missing_step_is_found() -> None:
    together = build_together("flowmoe", Shape(layers=2, micro_batches=2))
    program = tuple(step for step in together.program if str(step) != "F0:C1b1")
    with pytest.raises(ScheduleError, match="F0 lacks C1b1"):
        check_together(dataclasses.replace(together, program=program))


@pytest.mark.parametrize("order", TOGETHER_ORDERS)
def test_ranks_of_any_speed_come_to_the_end(order: str) -> None:
    """What check_together proves, tried: four ranks go on at random; a receive needs the sends of all."""
    together, chance = build_together(order, Shape(layers=3, micro_batches=3)), random.Random(0)
    places, sent = [0] * 4, [set[Action]() for _ in range(4)]

    def may_go_on(rank: int) -> bool:
        if places[rank] == len(together.program):
            return False
        step = together.program[places[rank]]
        receives = step.action.is_transfer and together.shape.endpoints(step.action)[1] == step.worker
        return not receives or all(step.action in others for others in sent)

    while ready := [rank for rank in range(4) if may_go_on(rank)]:
        rank = chance.choice(ready)
        sent[rank].add(together.program[places[rank]].action)
        places[rank] += 1
    assert places == [len(together.program)] * 4


def test_unknown_order_is_refused() -> None:
    with pytest.raises(PlanError, match="order='af-pipe' is none of collocated ranks: choose one of sequential"):
        build_together("af-pipe", Shape(layers=1, micro_batches=1))


@pytest.mark.parametrize("name", ["A0:D3f0", "F1:E0w12"])
def test_a_step_has_a_name_that_parses_back(name: str) -> None:
    assert str(Step.parse(name)) == name


@pytest.mark.parametrize("name", ["D3f0", "A0:", "X0:D3f0", "A0:D3w0"])
def test_anything_else_is_no_step(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no (worker|action)"):
        Step.parse(name)
