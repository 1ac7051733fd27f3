"""Training over a transport without tags and with exact sizes, as NCCL is: messages are announced, rows keep order."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from local_job import Batches, Gradients, LocalJob, make_batches, plain_step
from tiny import TinyMoE, tiny
from torch import Tensor

from lightning_afd import engine
from lightning_afd.device import HostValues
from lightning_afd.errors import ProtocolError, StaleMessage
from lightning_afd.placement import Layout
from lightning_afd.receives import Receives
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.together import TOGETHER_ORDERS
from lightning_afd.transport.announced import ANNOUNCEMENT_BYTES, AnnouncedLink
from lightning_afd.transport.base import Channel
from lightning_afd.transport.link import Link
from lightning_afd.transport.ordered import OrderedNetwork, OrderedTransport
from lightning_afd.transport.wire import HEADER_BYTES, Section

CPU = torch.device("cpu")
LAYOUTS = [
    Layout(attention=1, ffn=1),
    Layout(attention=2, ffn=2),
    Layout(attention=1, ffn=2, groups=2),
    Layout(attention=2, ffn=1, groups=(1, 2)),
    Layout(attention=1, ffn=1, groups=2, head="ffn"),
    Layout(attention=2, ffn=2, node_ranks=2),
    Layout(attention=2, ffn=4, groups=2, node_ranks=4),
]
SIZES: dict[str, Any] = {"hidden": 8, "expert_width": 4, "layers": 3}
EVERYTHING = (("aux", 0.05), ("shared_expert", True), ("tied", True))
Sizes = tuple[tuple[str, Any], ...]


def model_of(sizes: Sizes = ()) -> TinyMoE:
    return tiny(**SIZES, **dict(sizes)).double()


def batches_of(replicas: int, longer: int) -> Batches:
    return make_batches(replicas, 3, longer=longer)


@cache
def plain(sizes: Sizes, replicas: int, longer: int) -> tuple[float, Gradients]:
    return plain_step(model_of(sizes), batches_of(replicas, longer))


def job_of(layout: Layout, order: str = "af-pipe", sizes: Sizes = (), **choices: Any) -> LocalJob:
    return LocalJob(model_of(sizes), layout, order, network=OrderedNetwork(layout), **choices)


def difference(job: LocalJob, sizes: Sizes = ()) -> float:
    """The largest difference from the plain loop in a first step and in one of other sizes."""
    replicas = job.layout.attention
    return max(job.step(batches_of(replicas, n)).difference(*plain(sizes, replicas, n)) for n in (0, 5))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_equal_the_plain_loop_from_the_first_one_on(layout: Layout, order: str) -> None:
    assert difference(job_of(layout, order)) < 1e-12


@pytest.mark.parametrize("order", TOGETHER_ORDERS)
def test_also_where_ranks_have_both_roles(order: str) -> None:
    assert difference(job_of(Layout.together(3), order)) < 1e-12


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2]], ids=str)
def test_all_that_travels_beside_rows_is_announced_too(layout: Layout) -> None:
    """Router logits, bases with their routes, shared experts on F ranks."""
    job = job_of(layout, sizes=EVERYTHING, shared_experts="ffn", recompute="full")
    assert difference(job, EVERYTHING) < 1e-12


def test_ranks_without_rows() -> None:
    batches = [replica[:count] for replica, count in zip(make_batches(3, 4), (4, 0, 1), strict=True)]
    outcome = job_of(Layout(attention=3, ffn=2)).step(batches)
    assert outcome.difference(*plain_step(model_of(), batches)) < 1e-12


@pytest.mark.parametrize("order", ["layer-major", "zero-bubble"])
def test_messages_with_headers_among_their_rows_do_not_get_through(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """What goes over gloo needs tags in the first step, in which buffers have yet to be asked for."""
    monkeypatch.setattr(engine, "link_of", Link)
    job = job_of(LAYOUTS[0], order)
    with pytest.raises(ProtocolError, match=r"deadlock|a transport without tags delivers in the order of posts"):
        difference(job)


def test_rows_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that offers its buffers in another order than that of the sends, as if it looked for its own message."""
    job = job_of(LAYOUTS[0], "layer-major")
    take, kept = Receives.take, []

    def late(self: Receives, action: Action) -> Any:
        if str(action) == "D0f0":
            other = self._posted.pop(Action("D", 0, "f", 1))
            self._link.open(other)
            kept.append(other)
            self._posted[Action("D", 0, "f", 1)] = other
        return take(self, action)

    monkeypatch.setattr(Receives, "take", late)
    with pytest.raises(ProtocolError, match="has a buffer of"):
        job.step(make_batches(1, 3))
    assert kept


@pytest.mark.parametrize("order", ["layer-major", "zero-bubble"])
@pytest.mark.parametrize("layout", LAYOUTS[1:4], ids=str)
def test_dispatches_may_wait_for_their_counts_behind_the_next_computation(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, order: str
) -> None:
    """On a GPU counts are not there yet when a dispatch could begin: order and numbers stay those of the schedule."""
    monkeypatch.setattr(HostValues, "are_there", lambda self: False)
    job = job_of(layout, order)
    assert difference(job) < 1e-12
    first = next(engine for engine in job.engines if engine.attention)
    ran = [str(span.action) for span in first.runtime.spans]
    planned = [str(step.action) for step in first.program(3, training=True) if step.action.op != "S"]
    assert sorted(ran) == sorted(planned)
    for op in "DCHL":
        assert [name for name in ran if name[0] == op] == [name for name in planned if name[0] == op]
    if order == "layer-major" and layout.groups == 1:
        assert ran.index("D0f0") == ran.index("A0f1") + 1 and ran != planned


class Damaging(OrderedTransport):
    """Changes a field of the announcements on one channel."""

    def __init__(self, network: OrderedNetwork, rank: int, channel: Channel, field: int, change: int) -> None:
        super().__init__(network, rank)
        self._what = channel, field, change

    def announce(self, channel: Channel, peer: int, tag: int, announcement: Tensor) -> None:
        if channel == self._what[0]:
            announcement[:HEADER_BYTES].view(torch.int64)[self._what[1]] += self._what[2]
        super().announce(channel, peer, tag, announcement)


@pytest.mark.parametrize(
    ("channel", "field", "change", "error", "words"),
    [
        ("Df", 1, -1, StaleMessage, "step=1.*received .*step=0"),
        ("Cf", 7, 1, ProtocolError, "received .*micro_batch="),
        ("Df", 11, 1, ProtocolError, "bytes"),
        ("Cb", 13, 77, ProtocolError, "a known dtype"),
    ],
)
def test_announcements_are_compared_as_headers_are(
    channel: Channel, field: int, change: int, error: type[Exception], words: str
) -> None:
    job = job_of(LAYOUTS[0])
    network = job.network
    assert isinstance(network, OrderedNetwork)
    for rank, one in enumerate(job.engines):
        assert isinstance(one.link, AnnouncedLink)
        one.link._rows = Damaging(network, rank, channel, field, change)
    with pytest.raises(error, match=words):
        job.step(make_batches(1, 2))


def test_an_announcement_that_is_too_long_is_refused() -> None:
    network = OrderedNetwork(LAYOUTS[0])
    link = AnnouncedLink(network.transport(0), 0, CPU)
    section = Section(ANNOUNCEMENT_BYTES, 1, torch.int32, on_host=True)
    with pytest.raises(ProtocolError, match=f"for the host of its receiver, whose buffer has {ANNOUNCEMENT_BYTES}"):
        link.allocate(Action("H", 0, "f", 0), [section])


@pytest.mark.parametrize(("attention", "ffn", "shared"), [(1, 1, False), (2, 3, False), (2, 2, True)])
def test_full_capacity_needs_no_counts(monkeypatch: pytest.MonkeyPatch, attention: int, ffn: int, shared: bool) -> None:
    layout = Layout(attention=attention, ffn=ffn)
    choices = {"capacity": "full", "shared_experts": "ffn" if shared else "attention"}
    started: list[torch.Size] = []
    start = HostValues.__init__

    def noting(self: HostValues, values: Tensor) -> None:
        started.append(values.shape)
        start(self, values)

    monkeypatch.setattr(HostValues, "__init__", noting)
    assert difference(job_of(layout, sizes=EVERYTHING, **choices), EVERYTHING) < 1e-12
    assert not started
    job_of(layout).step(batches_of(attention, 0))
    assert started
