"""The transport of GPUs, over gloo; its streams and events on a device that only writes down what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_job import make_batches, plain_step
from pool import RankPool
from rank_job import RankJob
from tiny import TinyMoE, tiny

from lightning_afd.device import SideStream
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import Gradients, Outcome, join_gradients
from lightning_afd.schedule.shape import Shape
from lightning_afd.transport import p2p
from lightning_afd.transport.lanes import Lanes
from lightning_afd.transport.nccl import NcclTransport, Stock, bucket_of
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups

CPU = torch.device("cpu")


def model_of() -> TinyMoE:
    return tiny(aux=0.05, layers=3, hidden=8, expert_width=4).double()


def train(layout: Layout, order: str) -> tuple[float, Gradients, int]:
    """Two steps on the rank of this process: loss, gradients, and messages that have not been let go of."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    p2p.Lanes = lambda layout, queues: Lanes(layout, queues=True)  # type: ignore[misc, assignment]
    try:
        groups = ProcessGroups(layout, rank, timedelta(seconds=60))
    finally:
        p2p.Lanes = Lanes  # type: ignore[misc]
    groups.warm(CPU)
    groups.introduce(CPU)
    transport = NcclTransport(groups, CPU)
    job = RankJob(model_of(), layout, rank, transport, order, micro_batches=3)
    for _ in range(2):
        loss, grads = job.step(make_batches(layout.attention, 3))
    left = len(transport._leaving) + sum(map(len, transport._sends.values()))
    groups.destroy()
    return loss, grads, left


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        (Layout(attention=2, ffn=2), "af-pipe"),
        (Layout(attention=2, ffn=2, node_ranks=2), "af-pipe"),
        (Layout(attention=1, ffn=1, groups=2), "zero-bubble"),
        (Layout.together(2), "flowmoe"),
    ],
    ids=str,
)
def test_steps_over_process_groups_equal_the_plain_loop(pool: RankPool, layout: Layout, order: str) -> None:
    model = model_of()
    ranks = pool.run(train, layout.world, layout, order)
    replicas = [
        join_gradients(model, layout, [grads for _, grads, _ in ranks], replica) for replica in range(layout.attention)
    ]
    outcome = Outcome(sum(loss for loss, _, _ in ranks), replicas)
    assert outcome.difference(*plain_step(model, make_batches(layout.attention, 3))) < 1e-12
    assert not any(left for _, _, left in ranks)


LAYOUTS = [
    Layout(attention=2, ffn=3),
    Layout(attention=1, ffn=2, groups=3),
    Layout(attention=2, ffn=1, groups=(1, 2), head="ffn"),
    Layout(attention=1, ffn=3, groups=2, node_ranks=4),
    Layout.together(3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_lane_has_one_order_of_messages(layout: Layout) -> None:
    """On GPUs a lane is a queue: all its messages go from one worker group to one other, or upwards, or downwards."""
    lanes = Lanes(layout, queues=True)
    ranks = lanes.all()
    for layers in (1, 2, 5, 6):
        shape = Shape(
            layers=layers,
            groups=layout.groups,
            micro_batches=1,
            router_logits=True,
            head=layout.head,
            spreads=layout.spreads,
        )
        for action in shape.actions():
            if action.is_transfer:
                ends = shape.endpoints(action)
                for sender, receiver in product(*map(layout.ranks_of, ends)):
                    lane = lanes.of(f"{action.op}{action.phase}", sender, receiver)  # type: ignore[arg-type]
                    assert {sender, receiver} <= set(ranks[lane])
                    assert sender == receiver or (sender, receiver) in lanes.talks(lane)
                    down = sender > receiver
                    assert lane[1] == (down if layout.collocated else (*ends, action.is_exchange and down))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_over_gloo_a_channel_is_one_lane_or_two(layout: Layout) -> None:
    lanes = Lanes(layout, queues=False)
    everyone = list(range(layout.world))
    names = 8 if layout.attention_groups > 1 or layout.head == "ffn" else 4
    inside = 2 * 4 if layout.spreads else 0
    assert list(lanes.all().values()) == [everyone] * (names * (2 if layout.collocated else 1) + inside)
    assert (lanes.of("Df", 0, 1) == lanes.of("Df", 1, 0)) != layout.collocated
    assert lanes.of("Xf", 0, 1) != lanes.of("Xf", 1, 0)


class Recorder:
    """Stands for torch.cuda: streams and events that note what they are asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "compute"
        self.events = 0

    def Stream(self, device: torch.device) -> Any:
        return _Stream(self, "side")

    def Event(self) -> Any:
        self.events += 1
        return _Event(self, self.events)

    def current_stream(self) -> Any:
        return _Stream(self, self.current)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class _Stream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_event(self, event: Any) -> None:
        self.recorder.log.append(f"{self.name} waits for event {event}")

    def wait_stream(self, stream: Any) -> None:
        self.recorder.log.append(f"{self.name} waits for {stream.name}")


class _Event:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self.recorder, self.number = recorder, number

    def __str__(self) -> str:
        return str(self.number)

    def record(self) -> None:
        self.recorder.log.append(f"event {self.number} on {self.recorder.current}")


def test_packing_waits_for_its_event_only_and_the_rest_for_packing() -> None:
    recorder = Recorder()
    side = SideStream(torch.device("cuda"), recorder)
    with side.behind(7):
        recorder.log.append(f"pack on {recorder.current}")
    assert recorder.log == ["side waits for event 7", "pack on side", "compute waits for side"]
    with side.behind(None):
        assert recorder.current == "compute"  # nothing was counted: the rows follow what is launched
    with SideStream(CPU).behind(7):
        pass


def test_receives_wait_for_what_was_launched_when_their_buffer_was_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, device, **kwargs: empty(*args, **kwargs))
    stock = Stock(torch.device("cuda"), recorder)
    for _ in range(3):
        recorder.log.append("compute")
        assert stock.take(5000).numel() == 5000
        with stock.posting():
            assert recorder.current == "side"
    assert recorder.log == [
        *("compute", "event 1 on compute", "event 2 on compute", "side waits for event 1"),
        *("compute", "event 3 on compute", "side waits for event 2"),  # not for the second computation
        *("compute", "event 4 on compute", "side waits for event 3"),
    ]


def test_sizes_of_buffers_repeat() -> None:
    sizes = [*range(1, 5000, 7), 10**6, 2**30, 3 * 2**30 + 1]
    for size in sizes:
        assert size <= bucket_of(size) <= max(1.125 * size, size + 512)
    assert len({bucket_of(size) for size in range(2**20, 2**21)}) <= 10
    assert bucket_of(2**20) == 2**20


def test_a_cpu_keeps_the_transport_with_tags() -> None:
    assert not getattr(P2PTransport, "announces", False) and NcclTransport.announces


def cut(backends: str) -> tuple[list[str], bool]:
    """How this process gives up its connections where a job of these backends has failed."""
    dist.init_process_group("gloo")
    groups = ProcessGroups(Layout(attention=1, ffn=1), dist.get_rank(), timedelta(seconds=60))
    called: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args: called.append(name) or function(*args)

    p2p.dist.get_backend_config, known = (lambda: backends), p2p.dist.get_backend_config  # type: ignore[assignment]
    abort, destroy = p2p.distributed_c10d._abort_process_group, p2p.dist.destroy_process_group
    p2p.distributed_c10d._abort_process_group = noted("abort", abort)
    p2p.dist.destroy_process_group = noted("destroy", destroy)
    try:
        p2p.cut_off(groups)
    finally:
        p2p.dist.get_backend_config = known
        p2p.distributed_c10d._abort_process_group, p2p.dist.destroy_process_group = abort, destroy
    return called, dist.is_initialized()


@pytest.mark.parametrize(("backends", "calls"), [("cpu:gloo,cuda:nccl", {"abort"}), ("cpu:gloo", {"destroy"})])
def test_connections_of_a_failed_job_are_given_up(pool: RankPool, backends: str, calls: set[str]) -> None:
    """NCCL would wait for what a failed rank never sends; all of its communicators are ended together."""
    for called, is_connected in pool.run(cut, 2, backends):
        assert set(called) == calls
        assert not is_connected
