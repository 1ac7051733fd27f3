"""Collocated schedules: executable whatever the sizes, and as fast as their laws say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_afd.baselines.programs import Style, collocated_schedule
from lightning_afd.baselines.stages import Stages
from lightning_afd.baselines.units import interleaved, two_directions
from lightning_afd.errors import PlanError, ScheduleError
from lightning_afd.load import Chunks, Link, Load, by_kind, collocated
from lightning_afd.placement import Worker
from lightning_afd.schedule.check import check
from lightning_afd.schedule.shape import Schedule
from lightning_afd.simulate import simulate

UNIT = {"Af": 1, "Ab": 1, "Aw": 1, "Ef": 1, "Eb": 1, "Ew": 1, "Tf": 0, "Tb": 0, "Tw": 0}
WHOLE = UNIT | {"Ab": 2, "Tb": 0}
"""The same work where attention's backward is one action."""
LINK = Link(attention=1, ffn=1)


def one_way(shape: Stages, style: Style = Style(), together: int = 1) -> Schedule:  # noqa: B008 (a frozen value)
    return collocated_schedule("interleaved", shape, style, lambda stage: interleaved(shape, stage, together))


def both_ways(shape: Stages) -> Schedule:
    return collocated_schedule("dualpipe", shape, Style(split=True), lambda stage: two_directions(shape, stage))


def load(shape: Stages, seconds: Mapping[str, float], transfer: float = 0) -> Load:
    """D and C take a rank's links `transfer` seconds, hops are free."""
    return Load(
        seconds=by_kind(shape, seconds),
        bytes=lambda action: transfer if action.op in "DC" else 0,
        links=dict.fromkeys("DCH", LINK),
        machine=collocated,
    )


def dual(stages: int, micro_batches: int, layers: int) -> Stages:
    return Stages(
        layers=layers,
        groups=stages,
        chunks=stages,
        micro_batches=micro_batches,
        split_attention=True,
        directions=2,
    )


@settings(deadline=None, max_examples=60)
@given(
    stages=st.integers(1, 4),
    virtual=st.integers(1, 3),
    more=st.integers(0, 3),
    rounds=st.integers(1, 3),
    together=st.integers(1, 3),
    style=st.builds(Style, pipelined=st.booleans(), split=st.booleans()),
)
def test_stages_can_be_executed(stages: int, virtual: int, more: int, rounds: int, together: int, style: Style) -> None:
    virtual = 1 if stages == 1 else virtual
    shape = Stages(
        layers=stages * virtual + more,
        groups=stages,
        chunks=stages * virtual,
        micro_batches=stages * rounds * together,
        split_attention=style.split,
    )
    check(one_way(shape, style, together))


@settings(deadline=None, max_examples=30)
@given(half=st.integers(1, 4), more=st.integers(0, 3), rounds=st.integers(0, 3))
def test_two_directions_can_be_executed(half: int, more: int, rounds: int) -> None:
    check(both_ways(dual(2 * half, 4 * half + 2 * rounds, 2 * half + more)))


def test_a_stage_in_another_order_is_a_deadlock() -> None:
    shape = Stages(layers=4, groups=2, chunks=4, micro_batches=4)
    good = one_way(shape)
    last = one_way(replace(shape, groups=2, chunks=2)).programs  # no virtual stages on stage 1
    mixed = {worker: (last if worker.group else good.programs)[worker] for worker in shape.workers()}
    with pytest.raises(ScheduleError, match=r"waits at|which does not belong|lacks"):
        check(replace(good, programs=mixed))


@pytest.mark.parametrize(
    ("stages", "virtual", "micro_batches"), [(1, 1, 3), (2, 1, 2), (4, 1, 8), (2, 3, 4), (4, 2, 8)]
)
def test_bubble_of_interleaved_stages(stages: int, virtual: int, micro_batches: int) -> None:
    """(P - 1)/v of a micro-batch's forward and backward on one stage (2104.04473, section 2.2)."""
    layers = 2 * stages * virtual
    shape = Stages(layers=layers, groups=stages, chunks=stages * virtual, micro_batches=micro_batches)
    work = 6 * layers // stages
    seconds = simulate(one_way(shape), load(shape, WHOLE)).seconds
    assert seconds == micro_batches * work + (stages - 1) * work // virtual


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 20), (8, 16)])
def test_bubble_of_two_directions(stages: int, micro_batches: int) -> None:
    """(P/2 - 1)(F&B + B - 3W) at most, with F&B = F + B and B = 2F, W = F (2412.19437, table 2).

    That counts whole chunks; here a gradient leaves before the last weight gradient of its chunk.
    """
    shape = dual(stages, micro_batches, stages)
    forward = 2
    bubble = (stages // 2 - 1) * (3 * forward + 2 * forward - 3 * forward)
    lost = simulate(both_ways(shape), load(shape, UNIT)).seconds - 3 * forward * micro_batches
    assert 0 <= bubble / 2 <= lost <= bubble


def test_what_each_style_hides() -> None:
    """A layer, alone: attention 4, experts 4, and 2 per transfer; backwards twice that."""
    times = {"Af": 4, "Ab": 8, "Ef": 4, "Eb": 4, "Ew": 4, "Tf": 0, "Tb": 0}
    whole, halves = (Stages(layers=3, chunks=1, micro_batches=parts) for parts in (1, 2))
    half = {kind: seconds / 2 for kind, seconds in times.items()}
    exposed = simulate(one_way(whole), load(whole, times, 2)).seconds
    assert exposed == 3 * (4 + 4 + 8 + 8 + 4 * 2)
    experts, both = (
        simulate(one_way(halves, Style(pipelined=pipelined), 2), load(halves, half, 1)).seconds
        for pipelined in (False, True)
    )
    assert experts == 3 * (24 + 4 * 1)  # the first half's dispatch and the second one's combine show
    assert both < experts
    assert both >= 3 * 24


def test_two_directions_hide_transfers() -> None:
    """With transfers of half an action DualPipe loses less than a tenth, 1F1B nearly all of them."""
    shape, plain = dual(4, 16, 8), Stages(layers=8, groups=4, chunks=4, micro_batches=16)
    lost = (
        simulate(both_ways(shape), load(shape, UNIT, 0.5)).seconds
        - simulate(both_ways(shape), load(shape, UNIT)).seconds
    )
    exposed = (
        simulate(one_way(plain), load(plain, WHOLE, 0.5)).seconds - simulate(one_way(plain), load(plain, WHOLE)).seconds
    )
    transfers = 16 * 2 * 4 * 0.5
    assert exposed >= transfers
    assert lost < 0.4 * transfers


def test_sizes_that_have_no_order() -> None:
    with pytest.raises(PlanError, match="3 chunks of 4 layers for 2 stages"):
        Stages(layers=4, groups=2, chunks=3, micro_batches=1)
    with pytest.raises(PlanError, match="3 micro-batches for 2 interleaved stages"):
        interleaved(Stages(layers=4, groups=2, chunks=4, micro_batches=3), 0)
    with pytest.raises(PlanError, match="2 micro-batches for 2 stages: DualPipe needs"):
        two_directions(dual(2, 2, 4), 0)


SMALL = st.integers(0, 9)


@settings(deadline=None, max_examples=80)
@given(
    layers=st.integers(1, 4),
    parts=st.integers(1, 3),
    pipelined=st.booleans(),
    times=st.fixed_dictionaries({kind: SMALL for kind in ("Af", "Ab", "Ef", "Eb", "Ew", "Tf", "Tb")}),
    transfer=SMALL,
    reduces=st.lists(st.integers(0, 30), min_size=5, max_size=5),
    chunk=st.integers(1, 12),
)
def test_chunks_in_gaps_are_never_slower_than_reduces_at_the_end(
    *, layers: int, parts: int, pipelined: bool, times: dict[str, int], transfer: int, reduces: list[int], chunk: int
) -> None:
    """FlowMoE's Theorem 1 (2510.00207), for chunks of any size, as long as a chunk costs no start of its own."""
    shape = Stages(layers=layers, chunks=1, micro_batches=parts)
    schedule = one_way(shape, Style(pipelined=pipelined), parts)
    costs = replace(load(shape, times, transfer), reduce=lambda worker, layer: reduces[layer] * (worker.role == "A"))
    alone = simulate(schedule, replace(costs, reduce=lambda worker, layer: 0)).seconds
    gaps = simulate(schedule, replace(costs, chunks=Chunks(link=LINK, longest=chunk)))
    total = sum(reduces[: layers + 1])
    assert gaps.seconds <= alone + total
    assert sum(reduce.end - reduce.start for reduce in gaps.reduces) == total
    assert all(reduce.start >= reduce.asked for reduce in gaps.reduces)


def test_chunks_that_start_slowly_can_be_slower_than_reduces_at_the_end() -> None:
    """The theorem's condition: with a start per chunk, small ones lose."""
    shape = Stages(layers=2, chunks=1, micro_batches=2)
    schedule = one_way(shape, Style(pipelined=True), 2)
    costs = replace(load(shape, WHOLE, 1), reduce=lambda worker, layer: 4 * (worker.role == "A"))
    alone = simulate(schedule, replace(costs, reduce=lambda worker, layer: 0)).seconds
    small = simulate(schedule, replace(costs, chunks=Chunks(link=LINK, longest=0.25, launch=1))).seconds
    assert small > alone + 3 * 4


def test_a_transfer_goes_before_a_chunk_that_waits() -> None:
    """A chunk that could start when a transfer does waits; one that has started is not interrupted."""
    shape = Stages(layers=2, chunks=1, micro_batches=1)
    schedule = one_way(shape)
    costs = replace(load(shape, WHOLE, 3), reduce=lambda worker, layer: 5 * (worker.role == "A" and layer == 2))
    found = simulate(schedule, replace(costs, chunks=Chunks(link=LINK, longest=2)))
    sent = {str(carried.action): carried for carried in found.transfers}
    assert sent["D1b0"].start == found.reduces[0].asked  # both are ready at once
    assert [reduce.end - reduce.start for reduce in found.reduces] == [2, 2, 1]
    assert found.reduces[0].start == sent["D1b0"].end
    assert Worker("A", 0) == found.reduces[0].worker
