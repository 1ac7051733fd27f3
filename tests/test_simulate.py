"""What the simulator does with links, imbalance, reduces, memory and shared machines, by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_afd.errors import PlanError, ScheduleError
from lightning_afd.load import Link, Load, by_kind, collocated
from lightning_afd.placement import HEADS, Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.schedule.passes import forward_only, in_blocks, place_reduces
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.simulate import Simulation, simulate

A0, F0, A1, F1 = Worker("A", 0), Worker("F", 0), Worker("A", 1), Worker("F", 1)
SECONDS = {"Af": 10, "Ab": 20, "Aw": 9, "Ef": 5, "Eb": 6, "Ew": 7, "Tf": 1, "Tb": 2, "Tw": 3}
BYTES = {"Df": 8, "Db": 6, "Cf": 4, "Cb": 12, "Hf": 2, "Hb": 2, "Lf": 1, "Lb": 1, "Xf": 2, "Xb": 1, "Yf": 1, "Yb": 2}
LINK = Link(attention=2, ffn=1, latency=3)


def load(shape: Shape, bytes_: Mapping[str, float] = BYTES) -> Load:
    return Load(seconds=by_kind(shape, SECONDS), bytes=by_kind(shape, bytes_), links=dict.fromkeys("DCXYHL", LINK))


def spans(simulation: Simulation, rank: int) -> str:
    """Actions of a rank with start and end, without what takes no time."""
    found = (span for span in simulation.timeline.spans if span.rank == rank and span.seconds)
    return " ".join(f"{span.action} {span.start:g}-{span.end:g}" for span in found)


def test_one_micro_batch_by_hand() -> None:
    """Forward: A 10, dispatch 8 bytes at F's 1 byte/s + 3, E 5, combine 4 + 3, tail; backward the same way."""
    simulation = simulate(build("sequential", Shape(layers=1, micro_batches=1)), load(Shape(layers=1, micro_batches=1)))
    assert spans(simulation, 0) == "A0f0 0-10 C0f0 10-33 A1f0 33-34 A1b0 34-36 C0b0 36-66 A0b0 66-86"
    assert spans(simulation, 1) == "D0f0 0-21 E0f0 21-26 D0b0 26-45 E0b0 45-51 E0w0 51-58"
    assert simulation.seconds == 86
    assert simulation.timeline.exposed(0) == pytest.approx(53 / 86)
    assert simulation.busy[A0, None, "compute"] == 33 == simulation.bound
    assert simulation.busy[A0, LINK, "send"] == 7  # 14 bytes
    assert simulation.busy[F0, LINK, "receive"] == 14


def test_ranks_of_a_node_wait_for_one_another_by_hand() -> None:
    """Around E a rank sends 2 and 1 bytes to the others, at 1 byte/s + 3, and waits for theirs; A waits the longer."""
    shape = Shape(layers=1, micro_batches=1, spreads=True)
    simulation = simulate(build("sequential", shape), load(shape))
    assert spans(simulation, 0) == "A0f0 0-10 C0f0 10-42 A1f0 42-43 A1b0 43-45 C0b0 45-84 A0b0 84-104"
    assert spans(simulation, 1) == (
        "D0f0 0-21 X0f0 21-26 E0f0 26-31 Y0f0 31-35 D0b0 35-54 X0b0 54-58 E0b0 58-64 Y0b0 64-69 E0w0 69-76"
    )
    assert simulation.busy[F0, LINK, "receive"] == 14 + 6 and simulation.busy[F0, LINK, "send"] == 16 + 6


def test_base_hops_share_the_lanes_of_dispatches() -> None:
    """A0 sends the dispatch (8 bytes, 4 s), then the base (2 bytes, 1 s), which A1 receives at once."""
    shape = Shape(layers=2, groups=2, micro_batches=1)
    simulation = simulate(build("sequential", shape), load(shape))
    carried = {str(carried.action): carried for carried in simulation.transfers}
    assert (carried["D0f0"].asked, carried["D0f0"].start, carried["D0f0"].end) == (10, 10, 21)
    assert (carried["H0f0"].asked, carried["H0f0"].start, carried["H0f0"].end) == (10, 14, 18)
    alone = dataclasses.replace(load(shape), links={**dict.fromkeys("DC", LINK), "H": Link(attention=4, ffn=4)})
    carried = {str(carried.action): carried for carried in simulate(build("sequential", shape), alone).transfers}
    assert (carried["H0f0"].start, carried["H0f0"].end) == (10, 10.5)


@pytest.mark.parametrize("copies", [1, 3])
def test_attention_sends_the_base_beside_all_copies(copies: int) -> None:
    """Between p > 1 groups, A sends (copies + 1) / copies of F's bytes."""
    shape = Shape(layers=4, groups=2, micro_batches=8)
    sizes = {kind: 1 if kind[0] == "H" else copies for kind in BYTES}
    link = Link(attention=1, ffn=1)
    costs = dataclasses.replace(load(shape, sizes), links=dict.fromkeys("DCH", link))
    busy = simulate(build("af-pipe", shape), costs).busy
    sent = {role: sum(busy[Worker(role, group), link, "send"] for group in (0, 1)) for role in "AF"}
    assert sent["A"] * copies == sent["F"] * (copies + 1)


def test_messages_queue_at_both_ends() -> None:
    """Five dispatches are ready every 10 s, but F receives one in 20 s: each waits for those before it."""
    shape = Shape(layers=1, micro_batches=5)
    simulation = simulate(forward_only(build("layer-major", shape)), load(shape, BYTES | {"Df": 20}))
    arrivals = [carried.end for carried in simulation.transfers if carried.action.op == "D"]
    assert arrivals == [33, 53, 73, 93, 113]


def test_busiest_expert_rank_sets_the_pace() -> None:
    shape = Shape(layers=2, micro_batches=4)
    even, uneven = (
        simulate(build("af-pipe", shape), dataclasses.replace(load(shape), imbalance=imbalance)) for imbalance in (1, 2)
    )
    assert uneven.busy[F0, None, "compute"] == 2 * even.busy[F0, None, "compute"]
    assert uneven.busy[F0, LINK, "receive"] == 2 * even.busy[F0, LINK, "receive"]
    assert uneven.busy[A0, LINK, "send"] == even.busy[A0, LINK, "send"]
    assert uneven.seconds > even.seconds


@pytest.mark.parametrize("split", [False, True])
def test_a_layer_is_reduced_behind_its_last_gradient(split: bool) -> None:
    shape = Shape(layers=2, micro_batches=2, split_attention=split)
    costs = dataclasses.replace(load(shape), reduce=lambda worker, layer: 50 if worker.role == "A" else 0)
    simulation = simulate(build("sequential", shape), costs)
    assert [str(reduce.action) for reduce in simulation.reduces] == [
        f"A{layer}{'w' if split else 'b'}1" for layer in (2, 1, 0)
    ]
    ends = {span.action: span.end for span in simulation.timeline.spans}
    free = 0
    for reduce in simulation.reduces:
        assert reduce.asked == ends[reduce.action]
        assert (reduce.start, reduce.end) == (max(reduce.asked, free), max(reduce.asked, free) + 50)
        free = reduce.end
    drawn = [(reduce.rank, reduce.start, reduce.end) for reduce in simulation.timeline.reduces]
    assert drawn == [(0, reduce.start, reduce.end) for reduce in simulation.reduces]
    assert simulation.seconds == free


def test_a_schedule_with_places_reduces_at_the_first_one_behind_a_layer() -> None:
    shape = Shape(layers=2, micro_batches=2)
    costs = dataclasses.replace(load(shape), reduce=lambda worker, layer: 50 if worker.role == "A" else 0)
    without, placed = (simulate(s, costs) for s in (build("af-pipe", shape), place_reduces(build("af-pipe", shape))))
    places = {span.action: span.start for span in placed.timeline.spans if span.action.op == "S"}
    assert [reduce.asked for reduce in placed.reduces] == [places[Action("S", layer, "b", 0)] for layer in (2, 1, 0)]
    assert [reduce.start for reduce in placed.reduces] == [reduce.start for reduce in without.reduces]
    assert placed.seconds == without.seconds


def test_what_is_held_and_what_came_early() -> None:
    shape = Shape(layers=2, micro_batches=3)
    slow = {**SECONDS, "Ef": 100, "Eb": 100}
    simulation = simulate(build("layer-major", shape), dataclasses.replace(load(shape), seconds=by_kind(shape, slow)))
    assert [simulation.held(worker) for worker in (A0, F0)] == [7, 6]
    assert [simulation.early(worker) for worker in (A0, F0)] == [0, 2]


def test_collocated_roles_take_turns() -> None:
    """With both roles on the same ranks, nothing is computed at the same time."""
    shape = Shape(layers=2, micro_batches=4)
    simulation = simulate(build("layer-major", shape), dataclasses.replace(load(shape), machine=collocated))
    computed = sorted((span.start, span.end) for span in simulation.timeline.spans if not span.action.is_transfer)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(computed))
    assert simulation.busy[A0, None, "compute"] == sum(end - start for start, end in computed)
    assert (F0, None, "compute") not in simulation.busy


def test_what_collocated_systems_hide() -> None:
    """Nothing; transfers of chunks behind experts; behind attention, too. Apart, roles compute at the same time."""
    shape = Shape(layers=6, micro_batches=4)
    sizes = dict.fromkeys(BYTES, 6)
    shared = dataclasses.replace(load(shape, sizes), machine=collocated)
    exposed, major = build("sequential", shape), build("layer-major", shape)
    steps = [simulate(schedule, shared) for schedule in (exposed, in_blocks(major), major)]
    nothing, experts, all_ = (step.seconds for step in steps)
    assert nothing > 1.2 * experts > 1.2 * 1.1 * all_
    assert all_ < 1.1 * max(step.busy[A0, None, "compute"] for step in steps)
    assert simulate(major, load(shape, sizes)).seconds < 0.8 * all_


def test_deadlock_is_an_error() -> None:
    schedule = build("sequential", Shape(layers=1, micro_batches=2))
    backwards = dataclasses.replace(schedule, programs={A0: schedule.programs[A0][::-1], F0: schedule.programs[F0]})
    with pytest.raises(ScheduleError, match="A0 waits at A0b1"):
        simulate(backwards, load(schedule.shape))


def test_missing_cost_is_named() -> None:
    shape = Shape(layers=1, micro_batches=1)
    costs = dataclasses.replace(load(shape), seconds=by_kind(shape, {"Af": 1, "Ef": 1}))
    with pytest.raises(PlanError, match=r"no cost for A1f0: layer 1, micro-batch 0: the table has Af Ef, add Tf"):
        simulate(build("sequential", shape), costs)


SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 5),
    groups=st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3)),
    micro_batches=st.integers(1, 6),
    router_logits=st.booleans(),
    head=st.sampled_from(HEADS),
    split_attention=st.booleans(),
    spreads=st.booleans(),
)


@settings(max_examples=40)
@given(order=st.sampled_from(sorted(ORDERS)), shape=SHAPES)
def test_any_schedule_is_executed_as_it_stands(order: str, shape: Shape) -> None:
    """Programs in their order, nothing before what it waits for, no lane on two things, and work linear in size."""
    schedule = build(order, shape)
    simulation = simulate(schedule, load(shape))
    _check_programs(schedule, simulation)
    assert simulation.seconds >= simulation.bound
    exchanges = sum(action.is_exchange for program in schedule.programs.values() for action in program)
    assert simulation.events <= sum(map(len, schedule.programs.values())) + exchanges + len(schedule.programs)


def _check_programs(schedule: Schedule, simulation: Simulation) -> None:
    layout, ends = simulation.timeline.layout, dict[Action, float]()
    for worker, program in schedule.programs.items():
        own = [span for span in simulation.timeline.spans if span.rank == layout.ranks_of(worker)[0]]
        assert tuple(span.action for span in own) == program
        assert all(before.end <= after.start for before, after in itertools.pairwise(own))
        ends |= {span.action: span.end for span in own if not span.action.is_transfer}
    arrivals = ends | {carried.action: carried.end for carried in simulation.transfers}
    for span in simulation.timeline.spans:
        if not span.action.is_transfer:
            assert all(arrivals[before] <= span.start for before in schedule.shape.dependencies(span.action))
