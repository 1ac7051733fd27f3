"""A receive is a wait for the other side until it sends, and for the network from then on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded import SECONDS, simulated, spans

from lightning_afd.errors import ScheduleError
from lightning_afd.load import Link, Load, by_kind
from lightning_afd.placement import Layout
from lightning_afd.regime import regime_of
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.schedule.shape import Shape
from lightning_afd.simulate import simulate
from lightning_afd.timeline import Reduce, Timeline, waiting_seconds
from lightning_afd.waits import (
    CAUSES,
    Quantiles,
    compute_by_stage,
    mean_usage,
    stage_of,
    usage_of,
    waits_by_message,
    waits_by_stage,
    waits_of,
)

ONE = Shape(layers=1, micro_batches=2)
A0 = "A0f0 0-3, D0f0 3-4, A0f1 4-6, C0f0 6-9, A1f0 9-10"
F0 = "D0f0 0-5, E0f0 5-7, C0f0 7-8"
PAIR = Timeline(Layout(attention=1, ffn=1), (*spans(A0, 0), *spans(F0, 1)))


def seconds(timeline: Timeline, shape: Shape) -> dict[str, dict[str, float]]:
    """What each receive waited for, by `rank action`."""
    return {f"{w.span.rank} {w.span.action}": dict(w.seconds) for w in waits_of(timeline, shape)}


def test_a_wait_is_divided_where_the_sender_begins() -> None:
    assert seconds(PAIR, ONE) == {
        "0 C0f0": {"wait_for_F": 1.0, "wait_for_net": 2.0},
        "1 D0f0": {"wait_for_A": 3.0, "wait_for_net": 2.0},
    }


@pytest.mark.parametrize(("start", "parts"), [(-1.0, (0.0, 5.0)), (4.5, (4.5, 0.5)), (7.0, (5.0, 0.0))])
def test_parts_never_leave_the_receive(start: float, parts: tuple[float, float]) -> None:
    """Also where clocks disagree, and the sender seems to begin after its message has arrived."""
    moved = tuple(replace(s, start=start) if str(s.action) == "D0f0" and s.rank == 0 else s for s in PAIR.spans)
    assert tuple(seconds(replace(PAIR, spans=moved), ONE)["1 D0f0"].values()) == parts


def test_the_last_of_several_senders_counts() -> None:
    layout = Layout(attention=2, ffn=1)
    timeline = Timeline(layout, (*spans("D0f0 1-2", 0), *spans("D0f0 3-4", 1), *spans("D0f0 0-5", 2)))
    assert seconds(timeline, ONE) == {"2 D0f0": {"wait_for_A": 3.0, "wait_for_net": 2.0}}


def test_hops_and_logits_wait_for_the_role_of_their_sender() -> None:
    groups = Shape(layers=2, groups=2, micro_batches=1)
    hop = Timeline(Layout(attention=2, ffn=1, groups=2), (*spans("H0f0 1-2", 1), *spans("H0f0 0-4", 3)))
    assert seconds(hop, groups) == {"3 H0f0": {"wait_for_A": 1.0, "wait_for_net": 3.0}}
    tails = Shape(layers=1, micro_batches=1, head="ffn", router_logits=True)
    layout = Layout(attention=1, ffn=2, head="ffn")
    there = "L0f0 0-1, H1f0 1-2, H1b0 3-9"
    back = "L0f0 0-2, H1f0 2-5, H1b0 6-7"
    idle = "L0f0 0-0, H1f0 0-0, H1b0 0-0"  # an F rank without tail has the actions, and no messages
    timeline = Timeline(layout, (*spans(there, 0), *spans(back, 1), *spans(idle, 2)))
    assert seconds(timeline, tails) == {
        "0 H1b0": {"wait_for_F": 3.0, "wait_for_net": 3.0},
        "1 L0f0": {"wait_for_A": 0.0, "wait_for_net": 2.0},
        "1 H1f0": {"wait_for_A": 0.0, "wait_for_net": 3.0},
    }


def test_message_without_sender_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 1 waits in D0f0, but the timeline has none of rank 0"):
        waits_of(replace(PAIR, spans=PAIR.by_rank[1]), ONE)


def test_usage_adds_up_to_the_step() -> None:
    usage = usage_of(PAIR, waits_of(PAIR, ONE))
    nothing = dict(reduce=0, wait_for_A=0, wait_for_net=2, wait_for_F=0, bubble=0)
    assert usage[0].seconds() == nothing | dict(compute=6, send=1, wait_for_F=1)
    assert usage[1].seconds() == nothing | dict(compute=2, send=1, wait_for_A=3, bubble=2)
    assert usage[1].shares() | dict(busy=0.3, exposed=0.5, bubble=0.2) == usage[1].shares()
    assert mean_usage(usage.values()).compute == 4
    assert mean_usage(usage.values()).step == 10


@pytest.mark.parametrize(
    ("chunks", "exposed"),
    [
        ("9-9.5", 0),
        ("10-12", 2),
        ("9.5-12", 2),
        ("-1-1", 1),
        ("8-9 10-11 11-12", 2),
        ("10.25-10.5", 0.25),
        ("10-12 10-11 9-11.5", 2),
    ],
)
def test_reduces_count_where_nothing_else_happens(chunks: str, exposed: float) -> None:
    reduces = [chunk.rpartition("-") for chunk in chunks.split()]
    timeline = replace(PAIR, reduces=tuple(Reduce(i, 0, float(a), float(b)) for i, (a, _, b) in enumerate(reduces)))
    usage = usage_of(timeline, waits_of(timeline, ONE))
    assert usage[0].reduce == exposed
    assert usage[0].step == usage[1].step == timeline.seconds


GRID = [
    (order, shape)
    for order in ORDERS
    for shape in (
        Shape(layers=3, micro_batches=5),
        Shape(layers=4, groups=2, micro_batches=6, router_logits=True),
        Shape(layers=3, groups=2, micro_batches=4, head="ffn", router_logits=True),
    )
]


@pytest.mark.parametrize(("order", "shape"), GRID)
def test_every_simulated_step_is_accounted_for(order: str, shape: Shape) -> None:
    timeline = simulated(shape, order)
    waits = waits_of(timeline, shape)
    usage = usage_of(timeline, waits)
    for rank, own in timeline.by_rank.items():
        assert usage[rank].exposed == pytest.approx(waiting_seconds(own, timeline.layout.worker_of(rank).role))
        assert usage[rank].step == pytest.approx(timeline.seconds)
        assert min(usage[rank].seconds().values()) > -1e-12
    total = sum(sum(wait.seconds.values()) for wait in waits)
    for table in (waits_by_message(waits), waits_by_stage(waits, shape)):
        assert sum(q.total for causes in table.values() for q in causes.values()) == pytest.approx(total)
    assert sum(q.total for q in compute_by_stage(timeline).values()) == pytest.approx(
        sum(usage[rank].compute for rank in usage)
    )


def regime(shape: Shape, nbytes: float, **faster: float) -> tuple[str, dict[str, float], str]:
    """Bound, total waits by cause and advice of a simulated step; `faster` divides durations by op."""
    costs = {kind: value / faster.get(kind[0], 1) for kind, value in SECONDS.items()}
    link = Link(attention=1e9, ffn=1e9)
    load = Load(seconds=by_kind(shape, costs), bytes=lambda action: nbytes, links=dict.fromkeys("DCHL", link))
    timeline = simulate(build("af-pipe", shape), load).timeline
    waits = waits_of(timeline, shape)
    usage = usage_of(timeline, waits)
    total = {cause: sum(w.seconds.get(cause, 0) for w in waits) for cause in CAUSES}
    found = regime_of(timeline, usage)
    return found.bound, total, found.advice


def test_regime_is_the_largest_share() -> None:
    shape = Shape(layers=4, micro_batches=8)
    bound, waits, advice = regime(shape, 0, E=4)
    assert (bound, waits["wait_for_net"]) == ("attention", 0)
    assert waits["wait_for_A"] > 4 * waits["wait_for_F"]
    assert "give attention more of the ranks (attention=)" in advice and "have more under way" not in advice
    bound, waits, _ = regime(shape, 0, A=8)
    assert (bound, waits["wait_for_net"]) == ("FFN", 0)
    assert waits["wait_for_F"] > 4 * waits["wait_for_A"]
    bound, waits, advice = regime(shape, 5e7)
    assert bound == "communication"
    assert waits["wait_for_net"] > 4 * (waits["wait_for_A"] + waits["wait_for_F"])
    assert "is the network; let more computation hide messages" in advice
    bound, _, advice = regime(replace(shape, micro_batches=1), 1e6, A=1.5)
    assert bound == "attention" and "so have more under way at once (micro_batches=), and then give" in advice


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *(("D2f0", "E2"), ("D2b0", "E2"), ("C2f0", "A3"), ("C2b0", "A2"), ("H2f0", "A3"), ("H2b0", "A2")),
        *(("L1f0", "T4"), ("L1b0", "A1"), ("H4f0", "T4"), ("H4b0", "A4"), ("A1b0", "A1"), ("T4f0", "T4")),
    ],
)
def test_a_transfer_belongs_to_the_stage_that_needs_it(name: str, stage: str) -> None:
    shape = Shape(layers=4, groups=2, micro_batches=1, head="ffn", router_logits=True)
    assert stage_of(Action.parse(name), shape) == stage
    on_attention = replace(shape, head="attention")
    if not name.startswith(("H4", "T")):
        assert stage_of(Action.parse(name), on_attention) == stage.replace("T", "A")


def test_quantiles_are_durations_that_occurred() -> None:
    assert Quantiles.of([3.0]) == Quantiles(1, 3.0, 3.0, 3.0, 3.0)
    assert Quantiles.of(range(100, 0, -1)) == Quantiles(100, 5050, 50, 95, 99)
    assert Quantiles.of([1.0, 2.0]) == Quantiles(2, 3.0, 1.0, 2.0, 2.0)
