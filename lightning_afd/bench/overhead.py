"""Time of the engine's own work per step: coroutines, routing, headers, copies; no attention, experts or network.

All ranks of a job run one step inside this process and their messages are kept. Then one rank of each role repeats the
step alone against them, with layers and experts that do nothing.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd import attention_rank
from lightning_afd.bench.replay import Tap
from lightning_afd.engine import Engine
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.segments import Gradients, MicroBatch, UserStep
from lightning_afd.transport.local import LocalNetwork, LocalTransport

CPU = torch.device("cpu")
HIDDEN, TOP_K, EXPERTS = 8, 2, 8
"""Sizes of a layer; where there are more F ranks than experts, each gets one."""


@dataclass(frozen=True, kw_only=True)
class BareShape:
    """What the engine is given to do."""

    layout: Layout
    order: str = "af-pipe"
    layers: int = 8
    micro_batches: int = 4
    tokens: int = 4
    """Per micro-batch: few, as copies of rows are kernels and no work of the engine."""
    dedup: bool = True

    @property
    def experts(self) -> int:
        """Of a layer: each F rank has one at least."""
        return max(EXPERTS, self.layout.ffn)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The engine's own time of one rank."""

    worker: str
    step: float
    """Seconds of a whole step."""
    action: float
    """Seconds of an action, in the median of all."""
    by_kind: Mapping[str, float]
    """The same by op and phase."""
    actions: int
    """In a step."""


class Experts(nn.Module):
    """Weights by which the engine recognises experts; they are never used."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 2, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(count, HIDDEN, 1))

    def forward(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> Tensor:
        return torch.zeros_like(x_TH)


class Layer(nn.Module):
    """Routes each token to the same experts in every call."""

    def __init__(self, bare: BareShape) -> None:
        super().__init__()
        self.experts = Experts(bare.experts)
        self.idx_TK = torch.arange(bare.tokens * TOP_K).reshape(bare.tokens, TOP_K) % bare.experts
        self.w_TK = torch.full((bare.tokens, TOP_K), 1 / TOP_K)

    def forward(self, h_TH: Tensor) -> Tensor:
        return h_TH + self.experts(h_TH, self.idx_TK, self.w_TK)


class Model(nn.Module):
    def __init__(self, bare: BareShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(bare) for _ in range(bare.layers))
        self.h_TH = torch.zeros(bare.tokens, HIDDEN)

    def forward(self) -> Tensor:
        h_TH = self.h_TH
        for layer in self.layers:
            h_TH = layer(h_TH)
        return h_TH.new_zeros(())


class BareMicroBatch(MicroBatch):
    """The coroutine of a micro-batch without any autograd."""

    def forward(self, layer: int, y_TH: Tensor | None, base_TH: Tensor | None) -> Any:
        self._coroutine.resume(y_TH)
        if layer == 0:
            x_TH = self._coroutine.segment.x_TH
            assert x_TH is not None
            self._bare = Gradients(x_TH, x_TH)
        return None if layer == self._layers else self._coroutine.segment

    def tail_backward(self) -> Gradients:
        return self._bare

    def backward(self, layer: int, dx_TH: Tensor, dw_TK: Tensor, dh_TH: Tensor) -> Gradients | None:
        return self._bare if layer else None


class BareShard:
    """Experts that return what they get."""

    kernel = ""

    def forward(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor, keep: bool = True) -> tuple[Tensor, Any]:
        return x_TH, w_TK

    def backward(self, saved: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor, Any]:
        return dy_TH, saved, saved

    def weight_gradient(self, pending: Any) -> None:
        pass

    def zero_missing_gradients(self) -> None:
        pass


class BareJob:
    """All ranks of a layout with models that do nothing."""

    def __init__(self, bare: BareShape) -> None:
        self._bare = bare
        self._network = LocalNetwork(bare.layout)
        self._engines: list[Engine] = []
        self._models: list[Model] = []
        self._taps: list[Tap] = []
        choices = {"order": bare.order, "micro_batches": bare.micro_batches, "dedup": bare.dedup}
        for rank in range(bare.layout.world):
            model, transport = Model(bare), LocalTransport(self._network, rank)
            plan, layers = make_plan(model, bare.layout, **choices)
            tap = Tap(transport)
            engine = Engine(plan, rank, tap, transport)
            engine.place(model, layers)
            engine.connect(model, layers, CPU)
            if engine.experts is not None:
                engine.experts._shards = dict.fromkeys(range(bare.layers), BareShard())  # type: ignore[arg-type]
            self._engines.append(engine)
            self._models.append(model)
            self._taps.append(tap)

    def keep_messages(self) -> None:
        """Two steps of all ranks, so that buffers are as large as they need to be."""
        for _ in range(2):
            for tap in self._taps:
                tap.keep()
            self._network.run([lambda rank=rank: self._step(rank) for rank in range(len(self._engines))])  # type: ignore[misc]
        for tap in self._taps:
            tap.replay()

    def cost(self, rank: int, steps: int) -> Cost:
        """Medians of so many repetitions of one rank's step."""
        engine = self._engines[rank]
        kinds, totals = defaultdict[str, list[float]](list), list[float]()
        for _ in range(steps):
            engine.repeat()
            start = time.perf_counter()
            self._step(rank)
            totals.append(time.perf_counter() - start)
            for span in engine.runtime.spans:
                kinds[span.action.op + span.action.phase].append(span.seconds)
        return Cost(
            worker=", ".join(map(str, self._bare.layout.workers_of(rank))),
            step=statistics.median(totals),
            action=statistics.median(seconds for times in kinds.values() for seconds in times),
            by_kind={kind: statistics.median(times) for kind, times in kinds.items()},
            actions=len(engine.runtime.spans),
        )

    def _step(self, rank: int) -> None:
        engine, model, count = self._engines[rank], self._models[rank], self._bare.micro_batches
        step = UserStep(function=model, around=nullcontext)
        engine.run([step] * count if engine.is_attention else [], count, training=True)


def costs(bare: BareShape, steps: int) -> dict[str, Cost]:
    """The engine's own time of the first rank of each role ("A", "F"; "AF" of collocated ranks)."""
    layout = bare.layout
    ranks = {"AF": 0} if layout.collocated else {"A": 0, "F": layout.attention_groups * layout.attention}
    with _without_computation():
        job = BareJob(bare)
        job.keep_messages()
        return {role: job.cost(rank, steps) for role, rank in ranks.items()}


@contextmanager
def _without_computation() -> Iterator[None]:
    whole = attention_rank.MicroBatch
    attention_rank.MicroBatch = BareMicroBatch  # type: ignore[misc]
    try:
        with torch.no_grad():
            yield
    finally:
        attention_rank.MicroBatch = whole  # type: ignore[misc]
