import dataclasses
from collections.abc import Callable

import pytest

from lightning_afd.errors import ScheduleError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.check import check, in_flight
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.schedule.passes import forward_only
from lightning_afd.schedule.shape import Schedule, Shape

Program = tuple[Action, ...]
A0, F0 = Worker("A", 0), Worker("F", 0)


def edited(schedule: Schedule, worker: Worker, edit: Callable[[Program], Program]) -> Schedule:
    return dataclasses.replace(schedule, programs={**schedule.programs, worker: edit(schedule.programs[worker])})


def swap(first: str, second: str) -> Callable[[Program], Program]:
    a, b = Action.parse(first), Action.parse(second)
    return lambda program: tuple({a: b, b: a}.get(action, action) for action in program)


def fault(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    return str(caught.value)


def test_deadlock_says_who_waits_where_and_for_what() -> None:
    schedule = build("layer-major", Shape(layers=1, micro_batches=2))
    # F wants the gradient of micro-batch 1 before it has computed anything.
    late = edited(schedule, F0, lambda program: (Action.parse("D0b1"), *(a for a in program if str(a) != "D0b1")))
    assert fault(late).splitlines() == [
        "A0 waits at C0f0 for E0f0; F0 waits at D0b1 for A1b1",
        " A0 | A0f0  D0f0  A0f1  D0f1 [C0f0] A1f0  A1b0  D0b0  C0f1",
        " F0 |                        [D0b1] D0f0  E0f0  C0f0  D0f1",
    ]


def test_reversed_program() -> None:
    schedule = build("af-pipe", Shape(layers=2, groups=2, micro_batches=3))
    sentence = fault(edited(schedule, F0, lambda program: program[::-1])).splitlines()[0]
    assert "A1 waits at C0f0 for E0f0; F0 waits at E0w2 for E0b2; F1 waits at D1f0 for A1f0" in sentence


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ("D0f0", "X0f0", "A0 waits at C0f0 for Y0f0; F0 waits at X0f0 for D0f0"),
        ("X0f0", "E0f0", "A0 waits at C0f0 for Y0f0; F0 waits at E0f0 for X0f0"),
        ("E0f0", "Y0f0", "A0 waits at C0f0 for Y0f0; F0 waits at Y0f0 for E0f0"),
        ("Y0f0", "C0f0", "A0 waits at C0f0 for Y0f0; F0 waits at C0f0 for Y0f0"),
    ],
)
def test_exchanges_stand_between_their_neighbours(first: str, second: str, sentence: str) -> None:
    schedule = build("layer-major", Shape(layers=1, micro_batches=1, spreads=True))
    assert fault(edited(schedule, F0, swap(first, second))).splitlines()[0] == sentence


def test_exchanges_have_to_be_there() -> None:
    spread = build("layer-major", Shape(layers=1, micro_batches=1, spreads=True))
    lacking = edited(spread, F0, lambda program: tuple(a for a in program if str(a) != "X0f0"))
    assert fault(lacking).startswith("F0 lacks X0f0\n")
    more = dataclasses.replace(spread, shape=Shape(layers=1, micro_batches=1))
    assert fault(more).startswith("F0 has X0f0, which does not belong there\n")


@pytest.mark.parametrize(
    ("worker", "first", "second", "sentence"),
    [
        (A0, "A0f0", "D0f0", "A0 waits at D0f0 for A0f0; F0 waits at D0f0 for A0f0"),
        (A0, "C0f0", "A1f0", "A0 waits at A1f0 for C0f0"),
        (F0, "E0f0", "C0f0", "A0 waits at C0f0 for E0f0; F0 waits at C0f0 for E0f0"),
        (F0, "E1b0", "E1w0", "A0 waits at C1b0 for E1b0; F0 waits at E1w0 for E1b0"),
        (F0, "E0f0", "E0w1", "A0 waits at C0f0 for E0f0; F0 waits at E0w1 for E0b1"),
    ],
)
def test_swapped_actions(worker: Worker, first: str, second: str, sentence: str) -> None:
    schedule = build("sequential", Shape(layers=2, micro_batches=2))
    assert fault(edited(schedule, worker, swap(first, second))).startswith(sentence)


@pytest.mark.parametrize("order", ORDERS)
def test_any_dropped_or_doubled_action_is_found(order: str) -> None:
    schedule = build(order, Shape(layers=2, groups=2, micro_batches=2, router_logits=True))
    for worker, program in schedule.programs.items():
        for place, action in enumerate(program):
            without = edited(schedule, worker, lambda program, place=place: program[:place] + program[place + 1 :])
            assert fault(without).startswith(f"{worker} lacks {action}\n")
            doubled = edited(schedule, worker, lambda program, action=action: (*program, action))
            assert fault(doubled).startswith(f"{worker} has {action} twice\n")


def test_any_action_moved_before_what_it_waits_for_is_found() -> None:
    schedule = build("af-pipe", Shape(layers=3, groups=2, micro_batches=2, router_logits=True))
    for worker, program in schedule.programs.items():
        for place, action in enumerate(program):
            for before in set(schedule.shape.dependencies(action)) & set(program[:place]):
                text = fault(edited(schedule, worker, swap(str(before), str(action))))
                assert f"{worker} waits at " in text.splitlines()[0]


def test_tail_on_ffn_that_waits_for_itself_is_found() -> None:
    schedule = build("sequential", Shape(layers=1, micro_batches=1, head="ffn"))
    assert fault(edited(schedule, F0, swap("H1f0", "H1b0"))).startswith(
        "A0 waits at H1b0 for T1b0; F0 waits at H1b0 for T1b0"
    )


def test_foreign_actions_are_found() -> None:
    schedule = build("sequential", Shape(layers=1, micro_batches=1))
    foreign = edited(schedule, A0, lambda program: (*program, Action.parse("E0w0")))
    assert fault(foreign).startswith("A0 has E0w0, which does not belong there\n")
    unknown = edited(schedule, A0, lambda program: (*program, Action.parse("A7f0")))
    assert fault(unknown).startswith("A0 has A7f0, which does not belong there\n")


def test_a_phase_may_not_be_left_out() -> None:
    schedule = build("sequential", Shape(layers=1, micro_batches=1))
    no_weights = edited(schedule, F0, lambda program: tuple(a for a in program if a.phase != "w"))
    assert fault(no_weights).startswith("phases b f: ")
    nothing = dataclasses.replace(schedule, programs=dict.fromkeys(schedule.programs, ()))
    assert fault(nothing).startswith("phases none: ")


def test_a_program_for_each_worker() -> None:
    schedule = build("sequential", Shape(layers=1, micro_batches=1))
    alone = dataclasses.replace(schedule, programs={A0: schedule.programs[A0]})
    assert fault(alone) == "programs for A0: the shape has the workers A0 F0"


def test_receives_out_of_order_are_found() -> None:
    schedule = build("layer-major", Shape(layers=1, micro_batches=3))
    # Nothing waits for ever here, but the second message would be taken for the first.
    early = ("D0f1", "D0f0", "E0f0", "C0f0", "E0f1", "C0f1")
    program = tuple(map(Action.parse, early)) + schedule.programs[F0][6:]
    crossed = edited(schedule, F0, lambda _: program)
    assert fault(crossed).splitlines()[0] == "F0 receives D0f1 where A0 sends D0f0"
    assert fault(forward_only(crossed)).startswith("F0 receives D0f1 where A0 sends D0f0\n")


def test_errors_of_large_schedules_stay_small() -> None:
    schedule = build("sequential", Shape(layers=20, groups=2, micro_batches=8))
    text = fault(edited(schedule, F0, lambda program: program[::-1]))
    assert len(text.splitlines()) == 5
    assert max(map(len, text.splitlines()[1:])) < 120


def test_in_flight_counts_what_is_held() -> None:
    shape = Shape(layers=2, micro_batches=3)
    assert [in_flight(build("sequential", shape), worker) for worker in (A0, F0)] == [3, 2]
    assert [in_flight(build("layer-major", shape), worker) for worker in (A0, F0)] == [7, 6]
    assert [in_flight(forward_only(build("layer-major", shape)), worker) for worker in (A0, F0)] == [1, 1]
