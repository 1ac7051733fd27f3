"""Contenders of our own with all ranks inside this process: what a step leaves behind, and a step without messages."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_afd.bench.engine_step import EngineStep
from lightning_afd.bench.job import Arena
from lightning_afd.bench.names import Spec, parse
from lightning_afd.bench.workload import Workload
from lightning_afd.transport.announced import AnnouncedLink
from lightning_afd.transport.local import LocalNetwork
from lightning_afd.transport.ordered import OrderedNetwork

TINY = Workload(
    layers=2, hidden=16, heads=2, experts=4, top_k=2, width=8, vocabulary=32, seq_len=8, sequences=8, lr=0.5
)
ARENA = Arena(workload=TINY, attention=2, ffn=2, micro_batches=2, device="cpu")
NAMES = ["afd/af-pipe:2", "afd/zero-bubble:2", "ep", "flowmoe:3"]
NETWORKS = [LocalNetwork, OrderedNetwork]


class Contender:
    """Every rank's part of it; `network_type` says how messages travel."""

    def __init__(self, name: str, network_type: type[LocalNetwork]) -> None:
        spec = parse(name)
        assert spec is not None
        self.spec: Spec = spec.counted(ARENA.micro_batches)
        self.network = network_type(self.spec.layout(ARENA.attention, ARENA.ffn))
        self.steps = [EngineStep(self._job(rank), self.spec) for rank in range(ARENA.world)]

    def _job(self, rank: int) -> Any:
        """What a step asks a Job for."""

        def rows(step: int, index: int, replicas: int) -> Tensor:
            return TINY.batch(step).tensor_split(replicas)[index]

        def transport(layout: object) -> object:
            return self.network.transport(rank)

        device = torch.device("cpu")
        return SimpleNamespace(arena=ARENA, workload=TINY, rank=rank, device=device, rows=rows, transport=transport)

    def on_all(self, method: str) -> list[Any]:
        return self.network.run([getattr(step, method) for step in self.steps])

    def loss(self) -> float:
        """That of an optimizer step."""
        return sum(self.on_all("__call__"))


@cache
def losses_over_tags(name: str) -> list[float]:
    contender = Contender(name, LocalNetwork)
    return [contender.loss() for _ in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_gone_behind_a_step(name: str) -> None:
    """As those of other systems are, whose memory grows by all gradients in the next one."""
    contender = Contender(name, LocalNetwork)
    losses = [contender.loss(), contender.loss()]
    assert losses[0] != losses[1], "weights have moved"
    for step in contender.steps:
        assert step._owned and all(parameter.grad is None for parameter in step._owned)


@pytest.mark.parametrize("network_type", NETWORKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_repeats_alone_what_messages_brought(name: str, network_type: type[LocalNetwork]) -> None:
    """Also where messages are announced, as on GPUs."""
    contender = Contender(name, network_type)
    announced = network_type is OrderedNetwork
    assert all(isinstance(step.engine.link, AnnouncedLink) == announced for step in contender.steps)
    together = contender.on_all("_dry")
    contender.on_all("keep_messages")
    sent = dict(contender.network.sent_bytes)
    for step, loss in zip(contender.steps, together, strict=True):
        spans = step.compute_alone()
        assert {span.action.op for span in spans} >= ({"A"} if step.engine.is_attention else {"E"})
        step.tap.replay()
        step.engine.repeat()
        assert step._dry() == loss
        step.tap.live()
    assert contender.network.sent_bytes == sent, "nothing travels"
    assert sum(together) == losses_over_tags(name)[0]
    assert [contender.loss() for _ in range(2)] == losses_over_tags(name), "weights have stayed, and all is as before"


def test_what_is_given_back_is_what_was_kept() -> None:
    """Rows that are changed show in the loss: they do come from there."""
    contender = Contender("afd/af-pipe:2", OrderedNetwork)
    loss = contender.on_all("_dry")[0]
    contender.on_all("keep_messages")
    first = contender.steps[0]
    for message, kept in first.tap._kept.items():
        if message[0] == "rows":
            kept.view(torch.float32).mul_(2)
    first.tap.replay()
    first.engine.repeat()
    assert first._dry() != loss
