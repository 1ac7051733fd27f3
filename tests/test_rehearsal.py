"""A schedule that real ranks execute over gloo happens as the simulator says: no times here, only what follows what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from lightning_afd.load import Link, Load, by_kind
from lightning_afd.placement import Layout
from lightning_afd.rehearsal import Clock, Rehearsal
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.schedule.passes import channel_of
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.simulate import simulate
from lightning_afd.timeline import Span
from lightning_afd.transport.local import LocalNetwork, LocalTransport
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups

MILLISECONDS = {"Af": 0.5, "Ab": 0.7, "Aw": 0.4, "Ef": 0.9, "Eb": 1.0, "Ew": 0.8, "Tf": 0.3, "Tb": 0.3, "Tw": 0.3}


def load_of(shape: Shape) -> Load:
    seconds = by_kind(shape, {kind: value / 1000 for kind, value in MILLISECONDS.items()})
    link = Link(attention=1e9, ffn=1e9, latency=2e-4)
    return Load(seconds=seconds, bytes=lambda action: 4096, links=dict.fromkeys("DCHL", link))  # type: ignore[arg-type]


def schedule_of(order: str, groups: int, head: Any = "attention") -> Schedule:
    shape = Shape(layers=4, groups=groups, micro_batches=5, router_logits=groups > 1, head=head, split_attention=True)
    return build(order, shape)


def rehearse(layout: Layout, schedules: Sequence[Schedule]) -> list[list[Span]]:
    """The spans of this rank in the second step of each schedule, whose buffers the first one has asked for."""
    dist.init_process_group("gloo")
    groups = ProcessGroups(layout, dist.get_rank(), timedelta(seconds=60))
    groups.warm(torch.device("cpu"))
    transport = P2PTransport(groups, torch.device("cpu"))
    spans = []
    for schedule in schedules:
        rank = Rehearsal(schedule, load_of(schedule.shape), dist.get_rank(), transport)
        spans.append([rank.run(), rank.run()][1])
    groups.destroy()
    return spans


Orders = dict[Any, list[Action]]


def events(spans: Sequence[Span]) -> Orders:
    """The actions of each rank, in the order of their starts; those at the same time in their order in `spans`."""
    found: Orders = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        found[span.rank].append(span.action)
    return found


def messages(shape: Shape, layout: Layout, spans: Sequence[Span]) -> tuple[Orders, Orders]:
    """The messages of each channel as they were sent, and as their receiver got them."""
    sent: Orders = defaultdict(list)
    received: Orders = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.end):
        if span.action.is_transfer:
            mine = shape.endpoints(span.action)[1] == layout.worker_of(span.rank)
            (received if mine else sent)[channel_of(shape, span.action)].append(span.action)
    return sent, received


def too_early(shape: Shape, spans: Sequence[Span]) -> list[Action]:
    """Computations that began before all was finished that they depend on, through messages on any rank."""
    ends = {span.action: span.end for span in spans if not span.action.is_transfer}
    starts = {span.action: span.start for span in spans if not span.action.is_transfer}
    return [
        action for action, start in starts.items() if any(ends[before] > start for before in shape.producers(action))
    ]


@pytest.mark.parametrize(("groups", "head"), [(1, "attention"), (2, "attention"), (2, "ffn")])
def test_real_ranks_do_what_the_simulator_says(pool: RankPool, groups: int, head: Any) -> None:
    layout = Layout(attention=1, ffn=1, groups=groups, head=head)
    schedules = [schedule_of(order, groups, head) for order in ("sequential", "af-pipe", "zero-bubble")]
    by_rank = pool.run(rehearse, layout.world, layout, schedules)
    for number, schedule in enumerate(schedules):
        shape, real = schedule.shape, [span for spans in by_rank for span in spans[number]]
        simulation = simulate(schedule, load_of(shape))
        assert events(real) == events(simulation.timeline.spans)
        on_their_way: Orders = defaultdict(list)
        for carried in simulation.transfers:
            on_their_way[channel_of(shape, carried.action)].append(carried.action)
        assert messages(shape, layout, real) == (on_their_way, on_their_way)
        assert not too_early(shape, real) and not too_early(shape, simulation.timeline.spans)
    others = simulate(schedules[1], load_of(schedules[1].shape)).timeline.spans
    assert events(real) != events(others)


class PaperClock(Clock):
    """Time passes by sleeping only."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.time = max(self.time, moment)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("groups", "head"), [(1, "attention"), (2, "attention"), (2, "ffn"), (4, "attention")])
def test_without_any_delay_the_predicted_time_is_exact(order: str, groups: int, head: Any) -> None:
    """What real ranks are slower than predicted is their delays, then, and nothing that they do otherwise."""
    schedule = schedule_of(order, groups, head)
    load = replace(load_of(schedule.shape), bytes=lambda action: 0)
    network, clocks = LocalNetwork(Layout(attention=1, ffn=1, groups=groups, head=head)), list[PaperClock]()
    ranks = []
    for rank in range(2 * groups):
        clocks.append(PaperClock())
        ranks.append(Rehearsal(schedule, load, rank, LocalTransport(network, rank), clocks[-1]))
    network.run([rank.run for rank in ranks])
    assert max(clock.time for clock in clocks) == pytest.approx(simulate(schedule, load).seconds, rel=1e-9)


def test_a_computation_before_its_message_is_seen() -> None:
    shape = Shape(layers=1, micro_batches=1)
    at = {"A0f0": (0.0, 1.0), "E0f0": (0.5, 2.0), "A1f0": (2.5, 3.0)}
    spans = [Span(Action.parse(name), 0, *times) for name, times in at.items()]
    assert list(map(str, too_early(shape, spans))) == ["E0f0"]
