"""One rank of a training job over process groups that has all of its parts, but no Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd.engine import Engine
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.recipes.local_job import Batches, Gradients, gradients_of, labels, micro_batch_loss, step_of
from lightning_afd.reduction import StepGradients
from lightning_afd.transport.p2p import P2PTransport


class RankJob:
    """The engine of this rank, its part of `model`, and its steps."""

    def __init__(
        self, model: nn.Module, layout: Layout, rank: int, transport: P2PTransport, order: str, **choices: Any
    ) -> None:
        device: torch.device = next(model.parameters()).device
        self._layout, self._rank, self._model = layout, rank, model
        plan, layers = make_plan(model, layout, order=order, **{"micro_batches": 4, **choices})
        self.engine = Engine(plan, rank, transport, transport)
        self.engine.place(model, layers)
        self.engine.connect(model, layers, device)
        owned = [parameter for _, parameter in owned_parameters(model)]
        self._gradients = StepGradients(owned, dense_parameters(model), self.engine.sums, self.engine.collectives)

    def step(self, batches: Batches) -> tuple[float, Gradients]:
        """One training step from zero gradients: this rank's share of the loss, and the gradients that it holds."""
        engine, total = self.engine, sum(labels(ids) for replica in batches for ids in replica)
        mine = batches[self._layout.index_of(self._rank)] if engine.is_attention else []
        steps = [step_of(lambda ids=ids: self._loss(ids), labels(ids) / total) for ids in mine]  # type: ignore[misc]
        self._model.zero_grad()
        self._gradients.begin(last=True)
        count = engine.agree(len(steps), 0.0).micro_batches
        results = engine.run(steps, count, training=True)
        self._gradients.end()
        self._gradients.install(torch.ones(()), last=True)
        done = zip(results, steps, strict=True)
        return sum(loss.item() * step.weight for loss, step in done if loss is not None), gradients_of(self._model)

    def _loss(self, ids_BS: Tensor) -> Tensor:
        return micro_batch_loss(self._model, ids_BS)
