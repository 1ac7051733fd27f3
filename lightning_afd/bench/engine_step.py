"""Contenders of our own: steps of the engine, optimizer step included, under one layout and order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightning_afd.bench.job import Job
from lightning_afd.bench.names import BEST, Spec
from lightning_afd.bench.ratios import ring_bytes
from lightning_afd.bench.replay import tap_of
from lightning_afd.bench.workload import loss_of
from lightning_afd.clock import clock_of, host_name
from lightning_afd.engine import Engine
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.plan import make_plan
from lightning_afd.recording.gather import Joined, Part, join
from lightning_afd.reduction import StepGradients
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.shape import Shape
from lightning_afd.segments import UserStep
from lightning_afd.timeline import Span

TRIALS = 3
"""Steps by which orders are compared."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank has measured of its last step."""

    part: Part
    optimizer: float
    """Seconds of the optimizer's step."""
    sent: dict[int, int]
    """Bytes by receiver, headers and sums of gradients included; what is sent in a ring counts for the next rank."""


class EngineStep:
    """One rank's part of a contender; calling it makes one optimizer step."""

    def __init__(self, job: Job, spec: Spec) -> None:
        """`spec` says how many micro-batches and in which order."""
        self.job, self.spec = job, spec
        self.layout = spec.layout(job.arena.attention, job.arena.ffn)
        transport = job.transport(self.layout)
        self.tap = tap_of(transport)
        self.model = job.workload.model(job.device)
        choices = {"order": spec.order, "micro_batches": spec.micro_batches, "dedup": spec.dedup}
        split = spec.order == "zero-bubble"
        self.plan, layers = make_plan(self.model, self.layout, split_attention=split, **choices)
        self.engine = Engine(self.plan, job.rank, self.tap, transport)
        self.engine.place(self.model, layers)
        self.engine.connect(self.model, layers, job.device)
        self.engine.runtime.clock = clock_of(job.device)
        self._owned = [parameter for _, parameter in owned_parameters(self.model)]
        dense = dense_parameters(self.model)
        if self.engine.sums is not None and spec.order not in ("sequential", "experts-only"):
            self.engine.sums.chunk_bytes = job.arena.chunk_bytes
        self._gradients = StepGradients(self._owned, dense, self.engine.sums, transport, self.engine.runtime.reducing)
        self._optimizer = job.workload.make_optimizer(self._owned)
        self._optimizer_seconds = 0.0
        self._number = 0

    def __call__(self) -> float:
        loss = self._forward_and_backward(self._work(self._number), last=True)
        start = time.perf_counter()
        self._optimizer.step()
        self._optimizer_seconds = time.perf_counter() - start
        self._optimizer.zero_grad()  # as others do: memory grows by all gradients in the next step
        self._number += 1
        return loss

    @property
    def shape(self) -> Shape:
        """That of the last step."""
        return self.engine.executed.schedule.shape

    # -- computation alone ----------------------------------------------------------------------------------------

    def keep_messages(self) -> None:
        """Collective: run forward and backward of the first batch, weights stay; `compute_alone` repeats it."""
        self._dry()  # tells both ends of each channel how large messages are
        self.tap.keep()
        self._dry()
        self.tap.live()

    def compute_alone(self) -> tuple[Span, ...]:
        """What a step takes without any message: no other rank is needed, and the weights stay.

        Transfers are packing and unpacking of rows, and nothing else.
        """
        self.tap.replay()
        self.engine.repeat()
        self._dry()
        self.tap.live()
        return tuple(self.engine.runtime.spans)

    def _dry(self) -> float:
        return self._forward_and_backward(self._work(0), last=False)

    # -- a step ---------------------------------------------------------------------------------------------------

    def _work(self, step: int) -> list[UserStep]:
        if not self.engine.is_attention:
            return []
        ids_bS = self.job.rows(step, self.layout.index_of(self.job.rank), self.layout.attention)
        parts = [part for part in ids_bS.tensor_split(self.plan.micro_batches) if len(part)]
        return [self._user_step(part) for part in parts]

    def _user_step(self, ids_bS: Tensor) -> UserStep:
        weight = len(ids_bS) / self.job.workload.sequences
        step: Callable[[], Tensor] = partial(loss_of, self.model, ids_bS)
        return UserStep(function=step, around=nullcontext, weight=weight, loss_of=lambda loss: loss)

    def _forward_and_backward(self, work: list[UserStep], *, last: bool) -> float:
        """This rank's part of the loss; with `last` its gradients are summed and in place, else they are dropped."""
        count = self.engine.agree(len(work), 0.0).micro_batches if last else self._count()
        self._gradients.begin(last=last)
        losses = self.engine.run(work, count, training=True)
        self._gradients.end()
        if last:
            self._gradients.install(torch.ones((), device=self.job.device), last=True)
        return sum(loss.item() * step.weight for loss, step in zip(losses, work, strict=True))

    def _count(self) -> int:
        """What ranks would agree on."""
        most = -(-self.job.workload.sequences // self.layout.attention)
        return min(self.plan.micro_batches, most)

    # -- what was measured ----------------------------------------------------------------------------------------

    def record(self) -> RankRecord:
        """What this rank has measured of its last step."""
        runtime, link = self.engine.runtime, self.engine.link
        sent: dict[int, int] = {}
        for (_, receiver), (_, nbytes) in link.sent.items():
            sent[receiver] = sent.get(receiver, 0) + nbytes
        copies = self.layout.copies_of(self.job.rank)
        reduces = tuple((reduce.start, reduce.end, int(reduce.nbytes)) for reduce in runtime.reduces)
        if len(copies) > 1:
            neighbour = copies[(copies.index(self.job.rank) + 1) % len(copies)]
            ring = ring_bytes(sum(nbytes for _, _, nbytes in reduces), len(copies))
            sent[neighbour] = sent.get(neighbour, 0) + int(ring)
        part = Part(
            times=list(runtime.times),
            reduces=reduces,
            sent=link.sent,
            tokens_per_expert=(),
            kernels=self.engine.kernels,
            host=host_name(),
            source=runtime.clock.source,
        )
        return RankRecord(part=part, optimizer=self._optimizer_seconds, sent=sent)

    def join(self, records: list[RankRecord]) -> Joined:
        """What all ranks have measured together."""
        return join([record.part for record in records], self.layout, self.engine.executed)


def make(job: Job, spec: Spec) -> EngineStep:
    """Collective: the contender; its order is the fastest one where the name leaves it open."""
    spec = spec.counted(job.arena.micro_batches)
    if spec.order == BEST:
        spec = replace(spec, order=fastest_order(job, spec))
    return EngineStep(job, spec)


def fastest_order(job: Job, spec: Spec) -> str:
    """Collective: the order whose fastest step of a few is the shortest one, taken in turns."""
    if spec.micro_batches == 1:
        return "sequential"
    orders = [order for order in ORDERS if order != "sequential"]
    steps = {order: EngineStep(job, replace(spec, order=order)) for order in orders}
    seconds: dict[str, list[float]] = {order: [] for order in orders}
    for _ in range(1 + TRIALS):
        for order, step in steps.items():
            seconds[order].append(job.slowest(step)[0])
    return min(orders, key=lambda order: min(seconds[order][1:]))


def computing(spans: Iterable[Span]) -> float:
    """Seconds of attention, experts and tails."""
    return sum(span.seconds for span in spans if not span.action.is_transfer)
