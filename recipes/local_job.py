"""Train a small model on all ranks of a layout inside this process, and the same in a plain loop.

Ids of a micro-batch have the shape [B rows, S positions]; `batches[a][m]` belongs to micro-batch m of data replica a.
What a model does here in a few megabytes is what it does on a cluster: the same engine, over queues instead of NCCL.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd.engine import Engine
from lightning_afd.expert_map import ExpertMap
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import Layout, Worker
from lightning_afd.plan import make_plan
from lightning_afd.reduction import StepGradients
from lightning_afd.segments import UserStep
from lightning_afd.transport.local import LocalNetwork

Batches = Sequence[Sequence[Tensor]]
Gradients = dict[str, Tensor]
Loss = Callable[[nn.Module, Tensor], Tensor]
"""Loss of a model on the ids of one micro-batch."""


@dataclass(frozen=True)
class Outcome:
    """Loss of the global batch, and per data replica the gradient of every parameter under its global name."""

    loss: float
    replicas: list[Gradients]

    def difference(self, loss: float, grads: Gradients, noise: float = 0.0) -> float:
        """The largest relative difference of loss and gradients, on all replicas, from those of a plain loop."""
        worst = [worst_difference(mine, grads, noise) for mine in self.replicas]
        return max(abs(self.loss - loss) / abs(loss), *worst)


class LocalJob:
    """The ranks of one job on the model's device, each with its part of a copy; `choices` are fields of the Plan."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        order: str = "af-pipe",
        *,
        network: LocalNetwork | None = None,
        loss: Loss | None = None,
        **choices: Any,
    ) -> None:
        self.layout = layout
        self._loss = loss or micro_batch_loss
        self.network = network or LocalNetwork(layout)
        self.engines: list[Engine] = []
        self.models: list[nn.Module] = []
        self._gradients: list[StepGradients] = []
        self._whole = model
        device = next(model.parameters()).device
        for rank in range(layout.world):
            own = copy.deepcopy(model)
            transport = self.network.transport(rank)
            plan, layers = make_plan(own, layout, **{"order": order, "micro_batches": 4, **choices})
            engine = Engine(plan, rank, transport, transport)
            engine.place(own, layers)
            engine.connect(own, layers, device)
            self.engines.append(engine)
            self.models.append(own)
            owned = [parameter for _, parameter in owned_parameters(own)]
            self._gradients.append(
                StepGradients(owned, dense_parameters(own), engine.sums, engine.collectives, engine.runtime.reducing)
            )

    def sum_in_chunks(self, chunk_bytes: int | None) -> None:
        """Let the next steps sum dense gradients over replicas in such chunks on the way; None: at their end."""
        for engine in self.engines:
            if engine.sums is not None:
                engine.sums.chunk_bytes = chunk_bytes

    def run(
        self, work: Sequence[Sequence[UserStep]], *, tails: Sequence[Sequence[UserStep]] = (), training: bool = True
    ) -> list[list[Any]]:
        """One step of all ranks, with `work` on the A ranks, those of group 0 first, and, where F ranks run tails,
        `tails[a]` for replica a.

        Returns what the steps returned whose end was reached, by replica.
        """

        work_of = dict(zip(self._attention_ranks, work, strict=False))

        def rank_step(rank: int) -> list[Any]:
            engine = self.engines[rank]
            steps = work_of[rank] if engine.is_attention else []
            count = engine.agree(len(steps), 0.0).micro_batches
            hosted = [] if engine.is_attention else [tails[replica] for replica in engine.replicas_of_tails]
            return engine.run(steps, count, training=training, tails=hosted)

        results = self._on_all(rank_step)
        return [self._results_of(replica, results) for replica in range(self.layout.attention)]

    @property
    def _attention_ranks(self) -> list[int]:
        """All A ranks, those of group 0 first."""
        return [rank for worker in self.layout.workers() if worker.role == "A" for rank in self.layout.ranks_of(worker)]

    def _results_of(self, replica: int, results: list[list[Any]]) -> list[Any]:
        rank = self.layout.tail_rank(replica)
        engine = self.engines[rank]
        if engine.is_attention:
            return results[rank]
        return engine.tail_results[engine.replicas_of_tails.index(replica)]

    def step(self, batches: Batches) -> Outcome:
        """One training step from zero gradients."""
        for model in self.models:
            model.zero_grad()
        total = sum(labels(ids) for replica in batches for ids in replica)
        layout = self.layout

        def steps(rank: int, replica: int) -> list[UserStep]:
            return [self._user_step(rank, ids, labels(ids) / total) for ids in batches[replica]]

        work = [steps(rank, layout.index_of(rank)) for rank in self._attention_ranks]
        tails = [steps(layout.tail_rank(replica), replica) for replica in range(layout.attention)]
        for gradients in self._gradients:
            gradients.begin(last=True)
        results = self.run(work, tails=tails)
        for gradients in self._gradients:
            gradients.end()
        self._on_all(lambda rank: self._gradients[rank].install(torch.ones(()), last=True))
        losses = [
            loss.item() * step.weight
            for steps, mine in zip(work, results, strict=False)
            for step, loss in zip(steps, mine, strict=True)
            if step.weight
        ]
        z_loss = sum(engine.plan.router_z_loss * engine.z_loss() for engine in self.engines)
        parts = [gradients_of(model) for model in self.models]
        return Outcome(
            sum(losses) + z_loss,
            [join_gradients(self._whole, self.layout, parts, a) for a in range(self.layout.attention)],
        )

    def _user_step(self, rank: int, ids_BS: Tensor, weight: float) -> UserStep:
        step = step_of(lambda: self._loss(self.models[rank], ids_BS), weight)
        return replace(step, router_z_loss=self.engines[rank].plan.router_z_loss)

    def _on_all(self, function: Callable[[int], Any]) -> list[Any]:
        return self.network.run([lambda rank=rank: function(rank) for rank in range(self.layout.world)])  # type: ignore[misc]


def gradients_of(model: nn.Module) -> Gradients:
    """The gradients that one rank holds."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def join_gradients(whole: nn.Module, layout: Layout, parts: Sequence[Gradients], replica: int) -> Gradients:
    """The gradients of one replica and of all experts, in the shapes of the whole model; `parts` are by rank.

    Those of shared experts on F ranks are taken from one of them.
    """
    grads: Gradients = dict(parts[layout.tail_rank(replica)])
    for worker in layout.workers():
        ranks = layout.ranks_of(worker)
        grads |= parts[ranks[replica % len(ranks)]]
    for layer in find_moe_layers(whole):
        expert_map = ExpertMap.contiguous(layer.num_experts, layout.ffn)
        order = torch.tensor([e for index in range(layout.ffn) for e in expert_map.rank_to_experts(index)])
        mine = {id(parameter) for parameter in layer.experts.parameters()}
        for name in (name for name, p in whole.named_parameters() if id(p) in mine):
            ranks = layout.ranks_of(Worker("F", layer.index % layout.ffn_groups))
            shards = [parts[rank][name] for rank in ranks if name in parts[rank]]
            grads.pop(name, None)
            if len(shards) == layout.ffn:
                grads[name] = torch.cat(shards)[order.argsort()]
    return grads


def step_of(function: Callable[[], Any], weight: float = 1.0) -> UserStep:
    """A step of any function that returns the loss."""
    return UserStep(function=function, around=nullcontext, weight=weight, loss_of=lambda result: result)


def micro_batch_loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Mean next-token loss, in the model's dtype, with the auxiliary loss where the model has one."""
    out = model(ids_BS)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
    return loss if out.aux_loss is None else loss + out.aux_loss


def plain_step(model: nn.Module, batches: Batches, loss_of: Loss | None = None) -> tuple[float, Gradients]:
    """The loop that everything must equal: micro-batches one after another, weighted by their labels."""
    model = copy.deepcopy(model)
    total = sum(labels(ids) for replica in batches for ids in replica)
    loss = 0.0
    for ids in (ids for replica in batches for ids in replica if labels(ids)):
        value = (loss_of or micro_batch_loss)(model, ids) * labels(ids) / total
        value.backward()
        loss += value.item()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def labels(ids_BS: Tensor) -> int:
    """Labels of a micro-batch; none where there is one position only. A Loss may read ~i for an i that is no label."""
    return int((ids_BS[:, 1:] >= 0).sum())


def worst_difference(got: Gradients, want: Gradients, noise: float = 0.0) -> float:
    """Largest |got - want| relative to the largest |want| of that parameter; infinite for a missing or NaN one.

    Gradients smaller than the part `noise` of the largest one of the model may be rounding: they count as that part.
    """
    if got.keys() != want.keys():
        return float("inf")
    floor = max(1e-30, noise * max(float(grad.abs().max()) for grad in want.values()))
    worst = 0.0
    for name in want:
        error = (got[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(floor)
        worst = max(worst, error.nan_to_num(float("inf")).item())
    return worst
