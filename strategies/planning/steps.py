"""Real steps of a model with a few MoE layers of the shape that is to be trained, on any layout of all ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd.allocate.request import Candidate
from lightning_afd.engine import Engine
from lightning_afd.model.lazy import without_storage
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.reduction import StepGradients
from lightning_afd.segments import UserStep
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.planning.subject import hub_config
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups


@dataclass(frozen=True, kw_only=True)
class Sample:
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

    def __init__(self, strategy: RankedStrategy, module: nn.Module, config: AFDConfig, sample: Sample) -> None:
        self._strategy = strategy
        self._precision = strategy.precision_plugin
        self._config = config
        self._sample = sample
        self._shape = hub_config(module)
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

    def seconds(self, layout: Layout) -> float:
        """Collective: the fastest of the steps behind a first one, each as long as its slowest rank's."""
        with self._groups(layout) as groups:
            device = self._strategy.root_device
            transport = P2PTransport(groups, device)
            arrangement = replace(self._config.planned(self._sample.candidate), layout=layout)
            model = self._model()
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
            times = [self._step(engine, model, sums) for _ in range(self._sample.repetitions + 1)]
            slowest = [max(each) for each in zip(*transport.all_gather(times), strict=True)]
            engine.disconnect()
        return min(slowest[1:])

    @contextmanager
    def _groups(self, layout: Layout) -> Iterator[ProcessGroups]:
        groups = ProcessGroups(layout, self._strategy.global_rank, timedelta(minutes=1))
        try:
            groups.warm(self._strategy.root_device)
            yield groups
        finally:
            if dist.is_initialized():
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
        return min(self._sample.candidate.micro_batches, self._sample.rows)

    def _steps(self, model: nn.Module) -> list[UserStep]:
        """The micro-batches of a replica: random ids."""
        shape = (self._sample.rows, self._sample.tokens)
        ids = torch.randint(0, self._shape.vocab_size, shape).to(self._strategy.root_device)
        return [self._user_step(model, part) for part in ids.tensor_split(self._count)]

    def _user_step(self, model: nn.Module, ids_BS: Tensor) -> UserStep:
        def function() -> Tensor:
            logits = model(input_ids=ids_BS).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())

        around = self._precision.train_step_context
        return UserStep(function=function, around=around, weight=1.0 / self._count, loss_of=lambda loss: loss)

    def _model(self) -> nn.Module:
        """On the meta device until it is known what this rank owns."""
        from transformers import AutoModelForCausalLM

        config, layers = copy.deepcopy(self._shape), self._sample.layers
        config.num_hidden_layers = layers
        for name, value in _ALL_MOE.items():
            if hasattr(config, name):
                setattr(config, name, value)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[-layers:]
        ways: dict[str, Any] = {
            name: getattr(config, f"_{name}", None) for name in ("attn_implementation", "experts_implementation")
        }
        chosen = {name: way for name, way in ways.items() if way is not None}
        with without_storage():
            return AutoModelForCausalLM.from_config(config, dtype=self._dtype, **chosen).train()


_ALL_MOE: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
"""Fields by which families have dense layers, with the values that they have none at."""
