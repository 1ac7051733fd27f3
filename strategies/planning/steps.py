"""Real steps of a model with a few MoE layers of the shape that is to be trained, on any layout of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd.allocate.request import Candidate
from lightning_afd.engine import Engine
from lightning_afd.errors import PlanError
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.model.sample import sample_of
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.reduction import StepGradients
from lightning_afd.segments import UserStep
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.transport.nccl import transport_of
from lightning_afd.transport.p2p import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What is timed."""

    rows: int
    """Of the batch of each replica."""
    tokens: int
    layers: int
    """MoE layers."""
    repetitions: int
    candidate: Candidate
    """Whose order, micro-batches and recomputation are used."""


class StepTimer:
    """Makes a layout's process groups and ranks, runs some steps, and takes all of it away again."""

    def __init__(self, strategy: RankedStrategy, module: nn.Module, config: AFDConfig, timing: Timing) -> None:
        self._strategy = strategy
        self._precision = strategy.precision_plugin
        self._config = config
        self._timing = timing
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self._sample = sample_of(module, dtype, strategy.root_device, timing.layers)

    def seconds(self, layout: Layout) -> float:
        """Collective: the fastest of the steps behind a first one, each as long as its slowest rank's."""
        layout = self._config.on_nodes(layout, self._strategy.num_processes)
        with self._groups(layout) as groups:
            device = self._strategy.root_device
            transport = transport_of(groups, device)
            arrangement = replace(self._config.planned(self._timing.candidate), layout=layout)
            model = self._sample.copy()
            plan, layers = make_plan(model, layout, **self._config.choices(arrangement))
            engine = Engine(plan, self._strategy.global_rank, transport, transport)
            engine.place(model, layers)
            engine.materialise(model, layers, device)
            model = self._precision.convert_module(model)
            engine.connect(model, layers, device)
            owned = [parameter for _, parameter in owned_parameters(model)]
            sums = StepGradients(
                owned, dense_parameters(model), engine.sums, engine.collectives, engine.runtime.reducing
            )
            times = [self._step(engine, model, sums) for _ in range(self._timing.repetitions + 1)]
            slowest = [max(each) for each in zip(*transport.all_gather(times), strict=True)]
            engine.disconnect()
        return min(slowest[1:])

    @contextmanager
    def _groups(self, layout: Layout) -> Iterator[ProcessGroups]:
        groups = ProcessGroups(layout, self._strategy.global_rank, timedelta(minutes=1))
        try:
            groups.warm(self._strategy.root_device)
            yield groups
        except PlanError:  # alike on all ranks; whatever else happens cuts all connections (`cut_off`)
            groups.destroy()
            raise
        groups.destroy()

    def _step(self, engine: Engine, model: nn.Module, gradients: StepGradients) -> float:
        """Seconds of one step of this rank, up to its summed gradients."""
        steps = self._steps(model) if engine.has_tail or engine.is_attention else []
        count = engine.agree(self._count if engine.is_attention else 0, 0.0).micro_batches
        tails = [] if engine.is_attention else [steps for _ in engine.replicas_of_tails]
        self._wait()
        start = time.perf_counter()
        gradients.begin(last=True)
        engine.run(steps if engine.is_attention else [], count, training=True, tails=tails)
        gradients.end()
        gradients.install(torch.ones((), device=self._strategy.root_device), last=True)
        self._wait()
        seconds = time.perf_counter() - start
        model.zero_grad()
        return seconds

    def _wait(self) -> None:
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)

    @property
    def _count(self) -> int:
        return min(self._timing.candidate.micro_batches, self._timing.rows)

    def _steps(self, model: nn.Module) -> list[UserStep]:
        """The micro-batches of a replica: random ids."""
        shape = (self._timing.rows, self._timing.tokens)
        ids = torch.randint(0, self._sample.whole.vocab, shape).to(self._strategy.root_device)
        return [self._user_step(model, part) for part in ids.tensor_split(self._count)]

    def _user_step(self, model: nn.Module, ids_BS: Tensor) -> UserStep:
        def function() -> Tensor:
            logits = model(input_ids=ids_BS).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())

        around = self._precision.train_step_context
        return UserStep(function=function, around=around, weight=1.0 / self._count, loss_of=lambda loss: loss)
