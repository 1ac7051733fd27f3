"""A job of one A rank and one F rank inside this thread, through the same engine as in training.

Its F rank has no experts and returns what it gets, so that each rank's own work is what its actions take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd.calibrate.setting import Setting, Taken, Timed, Times
from lightning_afd.cost.compute import optimizer_seconds
from lightning_afd.cost.measured import Point
from lightning_afd.engine import Engine
from lightning_afd.model.materialise import materialise
from lightning_afd.model.place import owned_parameters
from lightning_afd.model.sample import Sample
from lightning_afd.model.split import MoELayer
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.segments import UserStep
from lightning_afd.transport.base import Channel, Incoming
from lightning_afd.transport.local import LocalNetwork, LocalTransport

ONE_EACH = Layout(attention=1, ffn=1)


class SampleJob:
    """The two ranks of a small job in this thread."""

    def __init__(self, sample: Sample, setting: Setting) -> None:
        self._setting, self._sample = setting, sample
        self._network = LocalNetwork(ONE_EACH)
        self._attention, self.model = self._rank(0, Engine)
        self._echo, _ = self._rank(1, _Echoing)
        generator = torch.Generator().manual_seed(0)
        shape = (len(setting.batch.lengths), max(setting.batch.lengths))
        self._ids_BS = torch.randint(0, sample.shape.vocab, shape, generator=generator).to(setting.device)

    def times(self, seconds: float) -> tuple[Times, Times]:
        """Seconds by kind on the A rank, and of packing on the F rank by phase."""
        mine, others = Taken(), Taken()
        for repetition in self._setting.repetitions(seconds):
            self._step()
            if repetition:  # the first one asks for buffers
                mine.add_spans(self._attention.runtime.spans)
                others.add_spans(self._echo.runtime.spans)
        return _attention_times(mine, len(self._sample.layers)), _packing_times(others, len(self._sample.layers))

    def optimizer(self, seconds: float) -> Point:
        """One update of all that the A rank trains, by AdamW: what the optimizer will be is not known yet."""
        parameters = [parameter for _, parameter in owned_parameters(self.model) if parameter.grad is not None]
        optimizer = torch.optim.AdamW(parameters, lr=0.0)
        taken = Taken()
        for repetition in self._setting.repetitions(seconds):
            Timed(self._setting, taken if repetition else Taken())("w", optimizer.step)
        count = sum(parameter.numel() for parameter in parameters)
        estimate = optimizer_seconds(self._setting.job(self._sample, ONE_EACH), count)
        return Point(estimate=estimate, seconds=next(iter(taken.typical().values())))

    def _rank(self, rank: int, kind: type[Engine]) -> tuple[Engine, nn.Module]:
        model, transport = self._sample.copy(), _Local(self._network, rank, self._setting.time)
        choices = self._setting.choices
        plan, layers = make_plan(
            model,
            ONE_EACH,
            order="af-pipe",
            micro_batches=self._setting.in_flight,
            split_attention=choices.split_attention,
        )
        engine = kind(plan, rank, transport, transport)
        engine.place(model, layers)
        if rank == 0:
            materialise(model, {}, self._setting.device, 0)
        engine.connect(model, layers, self._setting.device)
        engine.runtime.clock = _OwnTime(transport)
        return engine, model

    def _step(self) -> None:
        step = UserStep(function=self._loss, around=self._setting.around, weight=1.0, loss_of=lambda loss: loss)
        steps: list[UserStep] = [step] * self._setting.in_flight
        pairs = ((self._attention, steps), (self._echo, []))
        self._network.run([partial(engine.run, own, self._setting.in_flight, training=True) for engine, own in pairs])

    def _loss(self) -> Tensor:
        found = self.model(input_ids=self._ids_BS, labels=self._ids_BS).loss
        assert isinstance(found, Tensor)
        return found


def _attention_times(taken: Taken, layers: int) -> Times:
    """Seconds by kind, sums over the layers: what an A rank does for a message belongs to the segment that sends it or
    needs it."""
    found: Times = defaultdict(float)
    for (op, layer, phase), seconds in taken.typical().items():
        elsewhere = (op, phase) in (("C", "f"), ("D", "b"))
        segment = layer + 1 if elsewhere else layer
        found[("T" if segment == layers else "A") + phase] += seconds
    return found


def _packing_times(taken: Taken, layers: int) -> Times:
    """What an F rank does for the messages of a layer, by phase."""
    found: Times = defaultdict(float)
    for (op, _, phase), seconds in taken.typical().items():
        if op in "DC":
            found[phase] += seconds / layers
    return found


class _OwnTime:
    """A clock that stands while its rank waits for a message."""

    source = "perf_counter"

    def __init__(self, transport: _Local) -> None:
        self._transport = transport

    def begin(self) -> None:
        """Nothing to do."""

    def mark(self) -> float:
        return self._transport.now() - self._transport.waited

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class _Local(LocalTransport):
    """Messages inside this thread that nobody copies; knows how long it has waited for them."""

    def __init__(self, network: LocalNetwork, rank: int, now: Callable[[], float]) -> None:
        super().__init__(network, rank)
        self.now, self.waited = now, 0.0

    def post(self, channel: Channel, peer: int, tag: int, nbytes: int) -> Incoming:  # type: ignore[override]
        return _Awaited(super().post(channel, peer, tag, nbytes), self)

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        self._network.deliver(channel, self._rank, peer, tag, message)


class _Awaited:
    def __init__(self, incoming: Incoming, transport: _Local) -> None:
        self._incoming, self._transport = incoming, transport

    def wait(self) -> Tensor:
        start = self._transport.now()
        try:
            return self._incoming.wait()
        finally:
            self._transport.waited += self._transport.now() - start


class _Echo:
    """In the place of a layer's experts: returns rows and gradients as they come."""

    kernel = ""

    def forward(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor, keep: bool = True) -> tuple[Tensor, Tensor]:
        return x_TH, w_TK

    def backward(self, saved: Tensor, dy_TH: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy_TH, saved, None

    def zero_missing_gradients(self) -> None:
        """There are none."""


class _Echoing(Engine):
    """An F rank without experts."""

    def _shard(self, layer: MoELayer) -> Any:
        return _Echo()
