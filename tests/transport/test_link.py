"""Exactly the rows that the routing asks for travel, in buffers that were agreed before, and damage is noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches
from tiny import TinyMoE, TinyRouter, tiny
from torch import Tensor

from lightning_afd.errors import ProtocolError, StaleMessage
from lightning_afd.expert_map import split_sizes
from lightning_afd.placement import Layout
from lightning_afd.schedule.actions import Action
from lightning_afd.transport.base import Channel, tag_of
from lightning_afd.transport.link import Link
from lightning_afd.transport.local import LocalNetwork, LocalTransport
from lightning_afd.transport.wire import HEADER_BYTES, Section, message_bytes

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"layers": 2, "hidden": 6, "experts": 5, "heads": 2, "expert_width": 4}


def padded(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


def routing_of(model: TinyMoE, ids: Tensor) -> list[Tensor]:
    """The experts that the whole model chooses, [T, K] per layer."""
    chosen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for module in model.modules()
        if isinstance(module, TinyRouter)
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return chosen


def rows_by_ffn_rank(idx_TK: Tensor, experts: int, ffn: int) -> list[int]:
    """Distinct (token, F rank) pairs, counted one by one."""
    owner = [rank for rank, size in enumerate(split_sizes(experts, ffn)) for _ in range(size)]
    pairs = {(token, owner[e]) for token, row in enumerate(idx_TK.tolist()) for e in row}
    return [sum(rank == n for _, rank in pairs) for n in range(ffn)]


def count(rows: int, top_k: int) -> dict[str, int]:
    """Payload of one (micro-batch, layer, F rank) by channel: x, w, idx there, y back; dY there, dx, dw back."""
    x, w, idx = padded(rows * 6 * 8), padded(rows * top_k * 8), padded(rows * top_k * 4)
    return {"Df": x + w + idx, "Cf": x, "Db": x, "Cb": x + w}


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_bytes_are_those_of_distinct_tokens_per_ffn_rank(top_k: int) -> None:
    """First step: a header announces each message that has rows; second step: the buffers fit."""
    model, batches = tiny(**SIZES, top_k=top_k).double(), make_batches(2, 3)
    job = LocalJob(model, Layout(attention=2, ffn=2))
    payload: Counter[tuple[str, int, int]] = Counter()
    headers, announced = Counter(payload), Counter(payload)
    for a, ids in [(a, ids) for a, replica in enumerate(batches) for ids in replica]:
        for idx_TK in routing_of(model, ids):
            for n, rows in enumerate(rows_by_ffn_rank(idx_TK, 5, 2)):
                for channel, size in count(rows, top_k).items():
                    route = (channel, a, 2 + n) if channel[0] == "D" else (channel, 2 + n, a)
                    payload[route] += size
                    headers[route] += HEADER_BYTES
                    announced[route] += HEADER_BYTES * (rows > 0)
    job.step(batches)
    assert job.network.sent_bytes == payload + headers + announced
    for engine in job.engines:
        sent = {(channel, engine.rank, peer): size for (channel, peer), (_, size) in engine.link.sent.items()}
        assert sent == {route: size for route, size in job.network.sent_bytes.items() if route[1] == engine.rank}
        assert engine.link.payload_bytes == sum(size for route, size in payload.items() if route[1] == engine.rank)
    job.network.sent_bytes.clear()
    job.step(batches)
    assert job.network.sent_bytes == payload + headers


def test_experts_of_one_rank_share_a_copy_of_the_token() -> None:
    """The count above is not the count of (token, expert) pairs."""
    idx_TK = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    assert rows_by_ffn_rank(idx_TK, 5, 2) == [2, 2]
    assert rows_by_ffn_rank(torch.tensor([[0, 1], [2, 1]]), 5, 2) == [2, 0]


class DamagingTransport(LocalTransport):
    """Lets a test change one message on its way."""

    def __init__(self, network: LocalNetwork, rank: int, damage: Callable[[Channel, int, Tensor], Tensor]) -> None:
        super().__init__(network, rank)
        self._damage = damage

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        super().send(channel, peer, tag, self._damage(channel, tag, message.clone()))


def set_field(message: Tensor, index: int, change: int) -> Tensor:
    message[:HEADER_BYTES].view(torch.int64)[index] += change
    return message


@pytest.mark.parametrize(
    ("channel", "field", "change", "error", "words"),
    [
        ("Df", 11, -1, ProtocolError, "expected rows of x, weights and int32 ids"),
        ("Df", 11, 1, ProtocolError, "expected"),
        ("Df", 14, 1000, ProtocolError, "bytes, received sections"),
        ("Cf", 11, -1, ProtocolError, r"expected \[Section"),
        ("Db", 12, 1, ProtocolError, "received"),
        ("Cb", 14, 1, ProtocolError, "received"),
        ("Cb", 1, -1, StaleMessage, "step=2.*received .*step=1"),
        ("Db", 8, 1, ProtocolError, "sender=0.*received .*sender=1"),
        ("Cf", 7, 1, ProtocolError, "micro_batch=1.*received .*micro_batch=2"),
    ],
)
def test_damage_to_one_header_of_a_running_job_is_named(
    channel: Channel, field: int, change: int, error: type[Exception], words: str
) -> None:
    layout = Layout(attention=1, ffn=1)
    job = LocalJob(tiny(**SIZES), layout)
    batches = make_batches(1, 3)
    job.step(batches)

    def damage(sent_on: Channel, tag: int, message: Tensor) -> Tensor:
        return set_field(message, field, change) if (sent_on, tag) == (channel, tag_of(1, 1)) else message

    for rank, engine in enumerate(job.engines):
        engine.link._transport = DamagingTransport(job.network, rank, damage)
    sender = 0 if channel[0] == "D" else 1
    place = rf"message {channel[0]}1{channel[1]}1 \(layer 1, micro-batch 1\) from rank {sender}: .*{words}"
    before = [parameter.detach().clone() for module in job.models for parameter in module.parameters()]
    with pytest.raises(error, match=place) as failure:
        job.step(batches)
    after = [parameter for module in job.models for parameter in module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True) if not new.is_meta)
    receiver = f"rank {1 - sender} ({'AF'[1 - sender]}0)"
    assert failure.value.__notes__ == [f"{receiver} failed in {channel[0]}1{channel[1]}1: layer 1, micro-batch 1"]


@pytest.fixture
def links() -> Iterator[tuple[Link, Link, LocalNetwork]]:
    network = LocalNetwork(Layout(attention=1, ffn=1))
    ends = [Link(LocalTransport(network, rank), rank, CPU) for rank in (0, 1)]
    yield ends[0], ends[1], network


ACTION = Action("D", 0, "f", 0)


def sections_of(rows: int) -> tuple[Section, ...]:
    return Section(rows, 4, torch.float32), Section(rows, 2, torch.float32), Section(rows, 2, torch.int32)


def exchange(links: tuple[Link, Link, LocalNetwork], rows: int, most: int) -> int:
    """Dispatch `rows` from rank 0 to rank 1; returns the number of messages that it took."""
    left, right, network = links

    def send() -> None:
        message, views = left.allocate(ACTION, sections_of(rows))
        for view in views:
            view.fill_(rows)
        left.send(ACTION, 1, message, message_bytes(sections_of(most)))

    network.sent_bytes.clear()
    received = network.run([send, right.post(ACTION, 0).wait])[1]
    assert [tuple(view.shape) for view in received] == [(rows, 4), (rows, 2), (rows, 2)]
    assert all((view == rows).all() for view in received)
    extra = network.sent_bytes["Df", 0, 1] - message_bytes(sections_of(rows))
    assert extra in (0, HEADER_BYTES)
    return 1 + extra // HEADER_BYTES


def test_capacity_grows_with_what_was_asked_for_and_never_shrinks(links: tuple[Link, Link, LocalNetwork]) -> None:
    """(rows, most rows of this micro-batch, messages), one step per line."""
    steps = [(3, 5, 2), (5, 5, 1), (6, 8, 2), (8, 8, 1), (0, 0, 1), (8, 8, 1), (9, 9, 2)]
    for step, (rows, most, messages) in enumerate(steps):
        for link in links[:2]:
            link.begin(step)
        assert exchange(links, rows, most) == messages, f"step {step}"


def test_capacity_holds_for_the_whole_step(links: tuple[Link, Link, LocalNetwork]) -> None:
    """What was asked for counts from the next step on, since buffers have been offered before."""
    for link in links[:2]:
        link.begin(1)
    assert [exchange(links, 4, 4), exchange(links, 4, 4), exchange(links, 0, 0)] == [2, 2, 1]


def test_ends_that_disagree_on_the_step_notice_it(links: tuple[Link, Link, LocalNetwork]) -> None:
    links[0].begin(4)
    links[1].begin(5)
    with pytest.raises(StaleMessage, match=r"from rank 0: expected .*step=5.*received .*step=4"):
        exchange(links, 2, 2)


def test_map_version_is_part_of_the_stamp() -> None:
    network = LocalNetwork(Layout(attention=1, ffn=1))
    left, right = (Link(LocalTransport(network, rank), rank, CPU, map_version=rank) for rank in (0, 1))
    with pytest.raises(StaleMessage, match=r"map_version=1.*received .*map_version=0"):
        exchange((left, right, network), 1, 1)
