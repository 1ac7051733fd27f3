import itertools
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_time import Paper, overhead

from lightning_afd.errors import PlanError
from lightning_afd.placement import HEADS, Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.check import check, in_flight
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import ORDERS, Knobs, build, largest_group
from lightning_afd.schedule.passes import forward_only
from lightning_afd.schedule.shape import Schedule, Shape

SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 9),
    groups=st.integers(1, 4) | st.tuples(st.integers(1, 3), st.integers(1, 3)),
    micro_batches=st.integers(1, 13),
    router_logits=st.booleans(),
    head=st.sampled_from(HEADS),
    split_attention=st.booleans(),
    spreads=st.booleans(),
)
LONG = 8
"""A run that every shape of the grid may have: P of the most groups."""
KNOBS = st.builds(
    Knobs,
    group=st.sampled_from(["auto", LONG, LONG + 3]),
    pending=st.integers(1, 9),
    pace=st.builds(Pace, transfer=st.sampled_from([0.0, 0.5, 3.0])),
)
A0 = Worker("A", 0)
GOLDEN = {
    "sequential": """
        A0: A0f0 D0f0 C0f0 A1f0 D1f0 C1f0 A2f0 A2b0 D1b0 C1b0 A1b0 D0b0 C0b0 A0b0
            A0f1 D0f1 C0f1 A1f1 D1f1 C1f1 A2f1 A2b1 D1b1 C1b1 A1b1 D0b1 C0b1 A0b1
        F0: D0f0 E0f0 C0f0 D1f0 E1f0 C1f0 D1b0 E1b0 C1b0 E1w0 D0b0 E0b0 C0b0 E0w0
            D0f1 E0f1 C0f1 D1f1 E1f1 C1f1 D1b1 E1b1 C1b1 E1w1 D0b1 E0b1 C0b1 E0w1""",
    "layer-major": """
        A0: A0f0 D0f0 A0f1 D0f1 C0f0 A1f0 D1f0 C0f1 A1f1 D1f1 C1f0 A2f0 A2b0 D1b0 C1f1 A2f1 A2b1 D1b1
            C1b0 A1b0 D0b0 C1b1 A1b1 D0b1 C0b0 A0b0 C0b1 A0b1
        F0: D0f0 E0f0 C0f0 D0f1 E0f1 C0f1 D1f0 E1f0 C1f0 D1f1 E1f1 C1f1
            D1b0 E1b0 C1b0 E1w0 D1b1 E1b1 C1b1 E1w1 D0b0 E0b0 C0b0 E0w0 D0b1 E0b1 C0b1 E0w1""",
}
GOLDEN["zero-bubble"] = GOLDEN["layer-major"].replace("E1w0 D1b1 E1b1 C1b1 E1w1", "D1b1 E1b1 C1b1 E1w0 E1w1")
GOLDEN["af-pipe"] = GOLDEN["layer-major"]  # two micro-batches are too few to begin with backward any earlier


def text(schedule: Schedule) -> str:
    return schedule.text().partition("\n")[2].replace("\n", " ")


@pytest.mark.parametrize("order", ORDERS)
def test_golden_programs(order: str) -> None:
    schedule = build(order, Shape(layers=2, micro_batches=2))
    assert text(schedule) == " ".join(GOLDEN[order].split())


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=40)
@given(shape=SHAPES, knobs=KNOBS)
def test_every_shape_can_be_executed(order: str, shape: Shape, knobs: Knobs) -> None:
    schedule = build(order, shape, knobs)
    check(schedule)
    check(forward_only(schedule))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=40)
@given(shape=SHAPES, knobs=KNOBS)
def test_one_machine_could_execute_an_order_from_its_start(order: str, shape: Shape, knobs: Knobs) -> None:
    seen: set[Action] = set()
    for action in ORDERS[order](shape, knobs):
        assert seen.issuperset(shape.producers(action))
        seen.add(action)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)])
def test_unequal_depths_can_be_executed(groups: tuple[int, int], order: str) -> None:
    """Also where there are fewer micro-batches than workers, no multiple of a run, or layers that fill no round."""
    workers = sum(groups)
    for layers, micro_batches in itertools.product((4, 7), (1, workers - 1, 2 * workers + 1)):
        shape = Shape(layers=layers, groups=groups, micro_batches=micro_batches, router_logits=True)
        check(build(order, shape))
        seen: set[Action] = set()
        for action in ORDERS[order](shape, Knobs()):
            assert seen.issuperset(shape.producers(action))
            seen.add(action)


def test_tail_on_ffn_in_order() -> None:
    """A hands all micro-batches over before it waits for a gradient; F takes one after the other."""
    schedule = build("layer-major", Shape(layers=1, micro_batches=2, head="ffn"))
    assert text(schedule) == (
        "A0: A0f0 D0f0 A0f1 D0f1 C0f0 A1f0 H1f0 C0f1 A1f1 H1f1 H1b0 A1b0 D0b0 H1b1 A1b1 D0b1 C0b0 A0b0 C0b1 A0b1 "
        "F0: D0f0 E0f0 C0f0 D0f1 E0f1 C0f1 H1f0 T1f0 T1b0 H1b0 H1f1 T1f1 T1b1 H1b1 "
        "D0b0 E0b0 C0b0 E0w0 D0b1 E0b1 C0b1 E0w1"
    )


def test_exchanges_stand_beside_what_comes_and_what_goes() -> None:
    """A dispatch is spread before anything else is done, also where it comes long before its experts."""
    schedule = build("sequential", Shape(layers=1, micro_batches=1, spreads=True))
    assert text(schedule) == (
        "A0: A0f0 D0f0 C0f0 A1f0 A1b0 D0b0 C0b0 A0b0 F0: D0f0 X0f0 E0f0 Y0f0 C0f0 D0b0 X0b0 E0b0 Y0b0 C0b0 E0w0"
    )


def test_unknown_order_lists_the_choices() -> None:
    choices = "sequential, layer-major, af-pipe, zero-bubble"
    with pytest.raises(PlanError, match=f"order='1f1b' is not known: choose one of {choices}"):
        build("1f1b", Shape(layers=1, micro_batches=1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_leave_before_anything_else_is_computed(order: str, groups: int) -> None:
    schedule = build(order, Shape(layers=4, groups=groups, micro_batches=5))
    for program in schedule.programs.values():
        for action, following in pairwise(program):
            if action.op == "A" and action.phase == "b" and action.layer > 0:
                assert following == Action("D", action.layer - 1, "b", action.micro_batch)
            if action.op == "E" and action.phase == "b":
                assert following == Action("C", action.layer, "b", action.micro_batch)


@pytest.mark.parametrize("micro_batches", [1, 4, 7])
def test_layer_major_dispatches_all_micro_batches_before_it_waits(micro_batches: int) -> None:
    program = build("layer-major", Shape(layers=3, micro_batches=micro_batches)).programs[Worker("A", 0)]
    first_wait = next(place for place, action in enumerate(program) if action.op == "C")
    dispatched = [action for action in program[:first_wait] if action.op == "D"]
    assert dispatched == [Action("D", 0, "f", m) for m in range(micro_batches)]
    waits = build("sequential", Shape(layers=3, micro_batches=micro_batches)).programs[Worker("A", 0)]
    assert waits[2] == Action("C", 0, "f", 0)


def test_af_pipe_alternates_one_forward_and_one_backward() -> None:
    schedule = build("af-pipe", Shape(layers=4, groups=2, micro_batches=24))
    for worker, program in schedule.programs.items():
        phases = [action.phase for action in program if action.op in "AE" and action.phase != "w" and action.layer < 4]
        steady = phases[phases.index("b") : len(phases) - phases[::-1].index("f")]
        assert "".join(steady) in "bf" * len(phases), worker
        assert len(steady) > len(phases) / 3


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("runs", [1, 2])
def test_af_pipe_overhead_floor(groups: int, rounds: int, runs: int) -> None:
    """Per worker beyond the first: one forward, one backward and the two transfers between."""
    shape = Shape(layers=groups * rounds, groups=groups, micro_batches=4 * groups * runs)
    schedule = build("af-pipe", shape)
    for transfer in (0.0, 0.25, 0.5, 1.0):
        assert overhead(schedule, transfer) <= 1 + 2 + 2 * transfer
    assert overhead(build("sequential", shape), 0.5) > 6


@pytest.mark.parametrize("micro_batches", range(5, 33))
def test_af_pipe_needs_no_round_number_of_micro_batches(micro_batches: int) -> None:
    schedule = build("af-pipe", Shape(layers=6, groups=2, micro_batches=micro_batches))
    assert overhead(schedule) <= 3
    assert overhead(schedule, 0.5) <= 6


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("tail", [0.0, 1.0])
def test_af_pipe_is_about_as_fast_as_holding_everything(groups: int, tail: float) -> None:
    shape = Shape(layers=2 * groups, groups=groups, micro_batches=8 * groups)
    times = {order: Paper(build(order, shape), transfer=0.5, tail=tail).makespan() for order in ORDERS}
    assert times["af-pipe"] <= 1.02 * times["layer-major"] < 0.6 * times["sequential"]


def test_af_pipe_holds_few_micro_batches() -> None:
    shape = Shape(layers=8, groups=2, micro_batches=40)
    pipe, major = build("af-pipe", shape), build("layer-major", shape)
    assert [in_flight(major, worker) for worker in shape.workers()][-1] == 160
    assert [in_flight(pipe, worker) for worker in shape.workers()] == [34, 29, 31, 27]


def test_run_is_at_most_the_group_asked_for() -> None:
    """The default is a run of 8 here; runs cannot be shorter than the ring."""
    shape = Shape(layers=8, groups=2, micro_batches=22)
    held = [in_flight(build("af-pipe", shape, Knobs(group=group)), Worker("A", 0)) for group in (4, 6, 8, 11, "auto")]
    assert held == [22, 28, 34, 43, 34]
    with pytest.raises(
        PlanError, match=r"group=3: a ring of 4 workers \(groups=2\) needs at least 4 micro-batches in a run"
    ):
        build("af-pipe", shape, Knobs(group=3))


@pytest.mark.parametrize("groups", [(1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("order", ["af-pipe", "zero-bubble"])
def test_unequal_depths_keep_all_workers_busy(groups: tuple[int, int], order: str) -> None:
    """Where all workers have equal work in sum, they have it 94 % of the time; one layer after the other has not."""
    shape = Shape(layers=12, groups=groups, micro_batches=32, split_attention=order == "zero-bubble")
    work = 3 * shape.layers * shape.micro_batches
    assert work > 0.94 * Paper(build(order, shape)).makespan()
    assert work < 0.92 * Paper(build("layer-major", shape)).makespan()


def test_runs_of_unequal_depths() -> None:
    """P is the number of workers; runs have 2P micro-batches, and cannot be shorter than P."""
    shape = Shape(layers=6, groups=(2, 1), micro_batches=12)
    assert build("af-pipe", shape).programs == build("af-pipe", shape, Knobs(group=6)).programs
    assert build("af-pipe", shape, Knobs(group=3)).programs != build("af-pipe", shape).programs
    with pytest.raises(PlanError, match=r"group=2: a ring of 3 workers \(groups=\(2, 1\)\) needs at least 3"):
        build("af-pipe", shape, Knobs(group=2))


@pytest.mark.parametrize("name", ["group", "pending"])
def test_knobs_are_checked(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}=0: an order needs at least 1"):
        Knobs(**{name: 0})


def test_group_is_as_large_as_memory_allows() -> None:
    shape = Shape(layers=4, groups=2, micro_batches=16)
    need = {g: in_flight(build("af-pipe", shape, Knobs(group=g)), Worker("A", 0)) for g in range(4, 9)}
    for group, held in need.items():
        found = largest_group("af-pipe", shape, lambda schedule, held=held: in_flight(schedule, A0) <= held)
        assert need[found] <= held < need.get(found + 1, 10**9)
        assert found >= group
    with pytest.raises(PlanError, match=r"runs of 4 micro-batches, the shortest for 2 group\(s\), do not fit"):
        largest_group("af-pipe", shape, lambda schedule: in_flight(schedule, A0) < need[4])


def weights_put_off(program: tuple[Action, ...], op: str) -> int:
    """The most weight gradients of a program that wait at once."""
    most = pending = 0
    for action in program:
        if action.op == op:
            pending += {"f": 0, "b": 1, "w": -1}[action.phase]
            most = max(most, pending)
    return most


@pytest.mark.parametrize("pending", [1, 2, 8])
def test_zero_bubble_puts_off_few_weight_gradients(pending: int) -> None:
    shape = Shape(layers=8, groups=4, micro_batches=32, split_attention=True)
    schedule = build("zero-bubble", shape, Knobs(pending=pending))
    found = [weights_put_off(program, worker.role.replace("F", "E")) for worker, program in schedule.programs.items()]
    assert max(found) == pending
    assert found[0] == min(found) == min(pending, 2)


def test_a_pace_has_all_times() -> None:
    with pytest.raises(PlanError, match=r"lacks Ew Tb Tf Tw$"):
        Pace(seconds={"Af": 1, "Ab": 1, "Aw": 1, "Ef": 1, "Eb": 1})
    with pytest.raises(PlanError, match="needs times >= 0"):
        Pace(transfer=-1)
