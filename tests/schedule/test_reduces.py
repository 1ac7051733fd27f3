"""Places for chunks of gradients: behind what completes a segment, never before what is ready to be sent."""

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_afd.errors import ScheduleError
from lightning_afd.placement import HEADS, Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.check import check, in_flight
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.schedule.passes import forward_only, place_reduces
from lightning_afd.schedule.shape import Schedule, Shape

Program = tuple[Action, ...]
A0, F0 = Worker("A", 0), Worker("F", 0)

schedules = st.builds(
    lambda order, **sizes: build(order, Shape(**sizes)),
    st.sampled_from(sorted(ORDERS)),
    layers=st.integers(1, 5),
    groups=st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3)),
    micro_batches=st.integers(1, 5),
    router_logits=st.booleans(),
    head=st.sampled_from(HEADS),
    split_attention=st.booleans(),
)


def test_places_of_one_layer_by_hand() -> None:
    schedule = place_reduces(build("layer-major", Shape(layers=1, micro_batches=2)))
    assert " ".join(map(str, schedule.programs[A0][-10:])) == "A1f1 A1b1 D0b1 S1b0 C0b0 A0b0 S1b1 C0b1 A0b1 S0b0"
    assert schedule.programs[F0] == build("layer-major", schedule.shape).programs[F0]


@given(schedules)
def test_places_change_nothing_else(schedule: Schedule) -> None:
    placed = place_reduces(schedule)
    check(placed)
    without = {w: tuple(a for a in program if a.op != "S") for w, program in placed.programs.items()}
    assert dataclasses.replace(placed, programs=without) == schedule
    assert forward_only(placed) == forward_only(schedule)
    for worker in schedule.programs:
        assert in_flight(placed, worker) == in_flight(schedule, worker)


@given(schedules)
def test_a_place_is_behind_all_gradients_of_its_segments_and_of_no_other(schedule: Schedule) -> None:
    shape = schedule.shape
    for worker, program in place_reduces(schedule).programs.items():
        own = {action.layer for action in program if action.op == "A"}
        last = {(s, m): "w" if shape.splits(s) else "b" for s in own for m in range(shape.micro_batches)}
        for action in program:
            if action.op == "A" and last.get((action.layer, action.micro_batch)) == action.phase:
                del last[action.layer, action.micro_batch]
            elif action.op == "S":
                below = max((segment for segment, _ in last), default=-1)
                assert below < action.layer == min(s for s in own if s > below)
        assert worker.role == "F" or not program or (program[-1].op == "S" and not last)


@given(schedules)
def test_what_is_ready_has_been_sent_before_a_chunk_may_go(schedule: Schedule) -> None:
    """A place is followed by a receive or by the end, and never by another place."""
    for worker, program in place_reduces(schedule).programs.items():
        for place, following in pairwise(program):
            if place.op == "S":
                assert following.is_transfer and schedule.shape.endpoints(following)[1] == worker


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_first_chunk_may_start_before_the_last_backward(order: str, groups: int) -> None:
    schedule = place_reduces(build(order, Shape(layers=4, groups=groups, micro_batches=4)))
    for worker, program in schedule.programs.items():
        if worker.role == "A":
            ops = [action.op + action.phase for action in program]
            assert ops.index("Sb") < len(ops) - 1 - ops[::-1].index("Ab") - groups


def edited(edit: Callable[[Program], Program], worker: Worker = A0) -> str:
    schedule = place_reduces(build("layer-major", Shape(layers=1, micro_batches=2)))
    programs = {**schedule.programs, worker: edit(schedule.programs[worker])}
    with pytest.raises(ScheduleError) as caught:
        check(dataclasses.replace(schedule, programs=programs))
    return str(caught.value)


def test_check_refuses_places_that_are_too_early_doubled_or_elsewhere() -> None:
    first, last, foreign = (Action.parse(name) for name in ("S1b0", "S0b0", "S2b0"))
    assert "A0 waits at S0b0 for A0b0" in edited(lambda program: (last, *program[:-1]))
    assert "A0 has S1b0 twice" in edited(lambda program: (*program, first))
    assert "F0 has S0b0, which does not belong there" in edited(lambda program: (*program, last), F0)
    assert "A0 has S2b0, which does not belong there" in edited(lambda program: (*program, foreign))
