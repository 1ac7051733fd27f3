"""How long this rank takes for the segments and experts of a model: they are run, on synthetic rows of the right sizes.

Attention, ends and everything around messages run in a job of one A rank and one F rank inside this thread, through the
same engine as in training; its F rank returns what it gets. Experts run apart, as many as an F rank would have.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import BatchShape, Choices, Job
from lightning_afd.cost.measured import Point
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.cost.traffic import load_of
from lightning_afd.engine import Engine
from lightning_afd.model.experts import ExpertShard, shard_experts
from lightning_afd.model.materialise import materialise
from lightning_afd.model.place import owned_parameters
from lightning_afd.model.sample import Sample
from lightning_afd.model.split import MoELayer
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.schedule.actions import Action
from lightning_afd.segments import UserStep
from lightning_afd.timeline import Span
from lightning_afd.transport.base import Channel, Incoming
from lightning_afd.transport.local import LocalNetwork, LocalTransport

TOGETHER = Layout(attention=1, ffn=1)
FEWEST = 3
"""Repetitions after a first one, whatever they take."""
Times = dict[str, float]
"""Seconds by kind of action."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What everything is measured in."""

    device: torch.device
    batch: BatchShape
    cluster: Cluster
    """Its scales are ignored."""
    choices: Choices
    now: Callable[[], float] = time.perf_counter
    """Seconds of any clock; called when the device has nothing left to do."""

    def time(self) -> float:
        """When the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.now()

    @property
    def dtype(self) -> torch.dtype:
        """Of messages and experts."""
        found = getattr(torch, self.choices.precision.compute)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of parameters."""
        return torch.float32 if self.choices.precision.weight_bytes > self.choices.precision.width else self.dtype

    def around(self) -> AbstractContextManager[Any]:
        """The context of a training step."""
        if self.dtype == self.weight_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def costs(self, sample: Sample, layout: Layout) -> StepCosts:
        """Estimates of a step of one micro-batch, without scales and without a floor."""
        return step_costs(self.job(sample, layout))

    def job(self, sample: Sample, layout: Layout) -> Job:
        """That step."""
        bare = replace(self.cluster, device=replace(self.cluster.device, scales={}, host_us=0.0))
        return Job(
            model=sample.shape, layout=layout, cluster=bare, batch=self.batch, micro_batches=1, choices=self.choices
        )


class Bench:
    """The parts of a sample on this rank, ready to be run as often as needed."""

    def __init__(self, sample: Sample, setting: Setting, layouts: Sequence[Layout]) -> None:
        """`layouts` give the loads of an F rank at which its experts are measured, smallest first."""
        self._sample, self._setting, self._layouts = sample, setting, layouts
        self._job = _SampleJob(sample, setting)

    def measure(self, seconds: float) -> dict[str, list[Point]]:
        """Points of every kind; takes about so many seconds."""
        found = defaultdict(list)
        share = seconds / (len(self._layouts) + 2)
        own, packing = self._job.times(share)
        estimates = _estimates(self._setting.costs(self._sample, TOGETHER))
        for kind, taken in own.items():
            found[kind].append(Point(estimate=estimates[kind], seconds=taken))
        for layout in self._layouts:
            for kind, point in self._experts(layout, packing, share).items():
                found[kind].append(point)
        found["O"].append(self._job.optimizer(share))
        return dict(found)

    def _experts(self, layout: Layout, packing: Times, seconds: float) -> dict[str, Point]:
        job = self._setting.job(self._sample, layout)
        load = load_of(job, self._sample.shape.moe[0])
        taken = _experts_times(self._sample, self._setting, layout, seconds)
        estimates = _estimates(step_costs(job))
        tokens = layout.attention * self._setting.batch.tokens
        rows = {"Ef": packing["f"], "Eb": packing["b"], "Ew": 0.0}
        layers = len(self._sample.layers)
        return {
            kind: Point(estimate=estimates[kind] / layers, seconds=taken[kind] + rows[kind] * load.tokens / tokens)
            for kind in taken
        }


def _estimates(costs: StepCosts) -> Times:
    """By kind, sums over the layers."""
    found: Times = defaultdict(float)
    for (op, layer, phase), cost in costs.actions.items():
        if op in "AE":
            found[("T" if op == "A" and layer == costs.shape.layers else op) + phase] += cost.seconds
    return found


class _SampleJob:
    """The two ranks of a small job in this thread."""

    def __init__(self, sample: Sample, setting: Setting) -> None:
        self._setting, self._sample = setting, sample
        self._network = LocalNetwork(TOGETHER)
        self._attention, self.model = self._rank(0, Engine)
        self._echo, _ = self._rank(1, _Echoing)
        generator = torch.Generator().manual_seed(0)
        shape = (len(setting.batch.lengths), max(setting.batch.lengths))
        self._ids_BS = torch.randint(0, sample.shape.vocab, shape, generator=generator).to(setting.device)

    def times(self, seconds: float) -> tuple[Times, Times]:
        """Seconds by kind on the A rank, and of packing on the F rank by phase."""
        mine, others = _Shortest(), _Shortest()
        for _ in _repetitions(self._setting, seconds):
            self._step()
            mine.add(self._attention.runtime.spans)
            others.add(self._echo.runtime.spans)
        layers = len(self._sample.layers)
        packing = {
            way: sum(mean for kind, mean in others.sums(layers).items() if kind in ("D" + way, "C" + way))
            for way in "fb"
        }
        return _attention_kinds(mine.found, layers), {way: value / layers for way, value in packing.items()}

    def optimizer(self, seconds: float) -> Point:
        """One update of all that the A rank trains, by AdamW."""
        parameters = [parameter for _, parameter in owned_parameters(self.model) if parameter.grad is not None]
        optimizer = torch.optim.AdamW(parameters, lr=0.0)
        taken = [_timed(self._setting, optimizer.step) for _ in _repetitions(self._setting, seconds)]
        count = sum(parameter.numel() for parameter in parameters)
        estimate = self._setting.costs(self._sample, TOGETHER).update.optimizer_seconds
        whole = _trained(self._setting.job(self._sample, TOGETHER))
        return Point(estimate=estimate * count / whole, seconds=min(taken))

    def _rank(self, rank: int, kind: type[Engine]) -> tuple[Engine, nn.Module]:
        model, transport = self._sample.copy(), _Local(self._network, rank, self._setting.time)
        choices = self._setting.choices
        plan, layers = make_plan(
            model, TOGETHER, order="sequential", micro_batches=1, split_attention=choices.split_attention
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
        run = [lambda: self._attention.run([step], 1, training=True), lambda: self._echo.run([], 1, training=True)]
        self._network.run(run)

    def _loss(self) -> Tensor:
        found = self.model(input_ids=self._ids_BS, labels=self._ids_BS).loss
        assert isinstance(found, Tensor)
        return found


def _trained(job: Job) -> float:
    from lightning_afd.cost.memory import dense_parameters, expert_parameters

    return float(max(dense_parameters(job, 0), expert_parameters(job, 0, 0)))


def _attention_kinds(seconds: Mapping[Action, float], layers: int) -> Times:
    """What an A rank does for a message belongs to the segment that sends it or needs it."""
    found: Times = defaultdict(float)
    for action, taken in seconds.items():
        sends_f = (action.op, action.phase) == ("D", "f")
        segment = action.layer
        if action.is_transfer:
            belongs_here = sends_f or (action.op, action.phase) == ("C", "b")
            segment = action.layer if belongs_here else action.layer + 1
        found[("T" if segment == layers else "A") + action.phase] += taken
    return found


class _Shortest:
    """The shortest time of each action over repetitions."""

    def __init__(self) -> None:
        self.found: dict[Action, float] = {}

    def add(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self.found[span.action] = min(span.seconds, self.found.get(span.action, float("inf")))

    def sums(self, layers: int) -> Times:
        """By op and phase."""
        found: Times = defaultdict(float)
        for action, seconds in self.found.items():
            found[action.op + action.phase] += seconds
        return found


def _experts_times(sample: Sample, setting: Setting, layout: Layout, seconds: float) -> Times:
    """One F rank's forward, input gradient and weight gradient of the rows of one micro-batch of all A ranks."""
    layer, generator = sample.layers[0], torch.Generator().manual_seed(0)
    owned = -(-layer.num_experts // layout.ffn)
    shard = ExpertShard(_experts_of(layer, owned, setting), recompute=setting.choices.recompute_experts)
    total = layout.attention * setting.batch.tokens
    idx_TK = torch.rand(total, layer.num_experts, generator=generator).topk(layer.top_k).indices
    idx_TK = idx_TK.where(idx_TK < owned, -1)
    idx_TK = idx_TK[(idx_TK >= 0).any(1)].to(setting.device)
    x_TH = torch.randn(len(idx_TK), sample.shape.hidden, generator=generator).to(setting.device, setting.dtype)
    w_TK = torch.full(idx_TK.shape, 1 / layer.top_k, device=setting.device)
    found: Times = {}
    for _ in _repetitions(setting, seconds):
        marks = [setting.time()]
        _, saved = shard.forward(x_TH, idx_TK, w_TK)
        marks.append(setting.time())
        assert saved is not None
        _, _, pending = shard.backward(saved, x_TH)
        marks.append(setting.time())
        shard.weight_gradient(pending)
        marks.append(setting.time())
        for kind, start, end in zip(("Ef", "Eb", "Ew"), marks, marks[1:], strict=False):
            found[kind] = min(found.get(kind, float("inf")), end - start)
    return found


def _experts_of(layer: MoELayer, owned: int, setting: Setting) -> nn.Module:
    """A copy of a layer's experts with random weights, as many as one F rank has."""
    import copy

    module = copy.deepcopy(layer.experts)
    shard_experts(module, range(owned))
    generator = torch.Generator(setting.device).manual_seed(0)
    for name, parameter in list(module.named_parameters(recurse=False)):
        data = torch.empty(parameter.shape, dtype=setting.weight_dtype, device=setting.device)
        setattr(module, name, nn.Parameter(data.normal_(0.0, 0.02, generator=generator)))
    return module


def _timed(setting: Setting, call: Callable[[], object]) -> float:
    start = setting.time()
    call()
    return setting.time() - start


def _repetitions(setting: Setting, seconds: float) -> Iterator[int]:
    """Numbers of repetitions: one, a few more, and on until they have taken so many seconds."""
    start, count = setting.time(), 0
    while count <= FEWEST or setting.time() - start < seconds:
        yield count
        count += 1


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
