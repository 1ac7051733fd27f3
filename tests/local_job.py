"""Train a small model on all ranks of a layout inside this process, and the same in a plain loop.

Ids of a micro-batch have the shape [B rows, S positions]; `batches[a][m]` belongs to micro-batch m of data replica a.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd.engine import Engine, make_plan
from lightning_afd.gradients import sum_over_replicas
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import ExpertMap, Layout
from lightning_afd.segments import UserStep
from lightning_afd.transport.local import LocalNetwork, LocalTransport

Batches = Sequence[Sequence[Tensor]]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Loss of the global batch, and per data replica the gradient of every parameter under its global name."""

    loss: float
    replicas: list[Gradients]

    def difference(self, loss: float, grads: Gradients) -> float:
        """The largest relative difference of loss and gradients, on all replicas, from those of a plain loop."""
        return max(abs(self.loss - loss) / abs(loss), *(worst_difference(mine, grads) for mine in self.replicas))


class LocalJob:
    """The ranks of one job, each with its own part of a copy of `model`."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        order: str = "af-pipe",
        *,
        micro_batches: int = 4,
        network: LocalNetwork | None = None,
    ) -> None:
        self.layout = layout
        self.network = network or LocalNetwork(layout)
        self.engines: list[Engine] = []
        self.models: list[nn.Module] = []
        self._whole = model
        for rank in range(layout.world):
            own = copy.deepcopy(model)
            transport = LocalTransport(self.network, rank)
            plan, layers = make_plan(own, layout, order=order, micro_batches=micro_batches)
            engine = Engine(plan, rank, transport, transport)
            engine.place(own, layers)
            engine.connect(layers, torch.device("cpu"))
            self.engines.append(engine)
            self.models.append(own)

    def run(self, work: Sequence[Sequence[UserStep]], *, training: bool = True) -> list[list[Any]]:
        """One step of all ranks with `work[a]` on A rank a; returns what the user's steps returned, by A rank."""

        def rank_step(rank: int) -> list[Any]:
            engine = self.engines[rank]
            steps = work[rank] if engine.is_attention else []
            count = engine.agree(len(steps), 0.0).micro_batches
            return engine.run(steps, count, training=training)

        return self._on_all(rank_step)[: self.layout.attention]

    def step(self, batches: Batches) -> Outcome:
        """One training step from zero gradients."""
        for model in self.models:
            model.zero_grad()
        total = sum(labels(ids) for replica in batches for ids in replica)
        work = [
            [user_step(model, ids, labels(ids) / total) for ids in replica]
            for model, replica in zip(self.models, batches, strict=False)
        ]
        results = self.run(work)
        self._on_all(self._sum_replicas)
        losses = [
            loss.item() * step.weight
            for steps, mine in zip(work, results, strict=True)
            for step, loss in zip(steps, mine, strict=True)
            if step.weight
        ]
        parts = [gradients_of(model) for model in self.models]
        return Outcome(
            sum(losses), [join_gradients(self._whole, self.layout, parts, a) for a in range(self.layout.attention)]
        )

    def _on_all(self, function: Callable[[int], Any]) -> list[Any]:
        return self.network.run([lambda rank=rank: function(rank) for rank in range(self.layout.world)])  # type: ignore[misc]

    def _sum_replicas(self, rank: int) -> None:
        if self.engines[rank].is_attention:
            own = [p for p in self.models[rank].parameters() if p.device.type != "meta"]
            sum_over_replicas(own, self.engines[rank].collectives)


def gradients_of(model: nn.Module) -> Gradients:
    """The gradients that one rank holds."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def join_gradients(whole: nn.Module, layout: Layout, parts: Sequence[Gradients], replica: int) -> Gradients:
    """The gradients of one A rank and of all experts, in the shapes of the whole model; `parts` are by rank."""
    grads = dict(parts[replica])
    for layer in find_moe_layers(whole):
        expert_map = ExpertMap.contiguous(layer.num_experts, layout.ffn)
        order = torch.tensor([e for index in range(layout.ffn) for e in expert_map.rank_to_experts(index)])
        mine = {id(parameter) for parameter in layer.experts.parameters()}
        for name in (name for name, p in whole.named_parameters() if id(p) in mine):
            shards = [part[name] for part in parts[layout.attention :] if name in part]
            if len(shards) == layout.ffn:
                grads[name] = torch.cat(shards)[order.argsort()]
    return grads


def user_step(model: nn.Module, ids_BS: Tensor, weight: float = 1.0) -> UserStep:
    """A step that returns the loss of a micro-batch."""
    return step_of(lambda: micro_batch_loss(model, ids_BS), weight)


def step_of(function: Callable[[], Any], weight: float = 1.0) -> UserStep:
    """A step of any function that returns the loss."""
    return UserStep(function=function, around=nullcontext, weight=weight, loss_of=lambda result: result)


def micro_batch_loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Mean next-token loss, in the model's dtype, with the auxiliary loss where the model has one."""
    out = model(ids_BS)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
    return loss if out.aux_loss is None else loss + out.aux_loss


def plain_step(model: nn.Module, batches: Batches) -> tuple[float, Gradients]:
    """The loop that everything must equal: micro-batches one after another, weighted by their labels."""
    model = copy.deepcopy(model)
    total = sum(labels(ids) for replica in batches for ids in replica)
    loss = 0.0
    for ids in (ids for replica in batches for ids in replica if labels(ids)):
        value = micro_batch_loss(model, ids) * labels(ids) / total
        value.backward()
        loss += value.item()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def labels(ids_BS: Tensor) -> int:
    """Labels of a micro-batch; none where there is one position only."""
    return ids_BS[:, 1:].numel()


def make_batches(replicas: int, micro_batches: int, *, longer: int = 0, vocab: int = 32) -> list[list[Tensor]]:
    """Seeded ids of which all micro-batches differ in rows (1 to 3) or in length (3 to 6, plus `longer`)."""
    generator = torch.Generator().manual_seed(replicas + 7 * longer)
    return [
        [
            torch.randint(0, vocab, (1 + (a + m) % 3, 3 + longer + (2 * a + m) % 4), generator=generator)
            for m in range(micro_batches)
        ]
        for a in range(replicas)
    ]


def worst_difference(got: Gradients, want: Gradients) -> float:
    """Largest |got - want| relative to the largest |want| of that parameter; infinite for a missing or NaN one."""
    if got.keys() != want.keys():
        return float("inf")
    worst = 0.0
    for name in want:
        error = (got[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-30)
        worst = max(worst, error.nan_to_num(float("inf")).item())
    return worst
