"""Train one step of a small model on all ranks of a layout inside this process, and the same step in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd.engine import Engine, make_plan
from lightning_afd.gradients import sum_over_replicas
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import ExpertMap, Layout
from lightning_afd.segments import UserStep
from lightning_afd.transport.local import LocalNetwork, LocalTransport


@dataclass
class Outcome:
    """Loss of the global batch and the gradient of every parameter under its global name."""

    loss: float
    grads: dict[str, Tensor]
    engines: list[Engine]
    network: LocalNetwork


def micro_batch_loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Mean next-token loss, in the model's dtype, with the auxiliary loss where the model has one."""
    out = model(ids_BS)
    logits = out.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
    aux = getattr(out, "aux_loss", None)
    return loss if aux is None else loss + aux


def plain_step(model: nn.Module, batches: list[list[Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """The loop that everything must equal: micro-batches one after another, weighted by their labels."""
    model = copy.deepcopy(model)
    total = sum(labels(ids) for replica in batches for ids in replica)
    loss = 0.0
    for ids in (ids for replica in batches for ids in replica):
        value = micro_batch_loss(model, ids) * labels(ids) / total
        value.backward()
        loss += value.item()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def local_step(
    model: nn.Module,
    layout: Layout,
    batches: list[list[Tensor]],
    order: str,
    *,
    prepare: Callable[[list[Engine]], None] = lambda engines: None,
    network: LocalNetwork | None = None,
    steps: int = 1,
) -> Outcome:
    """One training step (or several equal ones) on the ranks of `layout`; `batches[a][m]` are ids of replica a."""
    network = network or LocalNetwork(layout)
    engines, models = [], []
    for rank in range(layout.world):
        own = copy.deepcopy(model)
        transport = LocalTransport(network, rank)
        plan, layers = make_plan(own, layout, order=order, micro_batches=len(batches[0]))
        engine = Engine(plan, rank, transport, transport)
        engine.place(own, layers)
        engine.connect(layers, torch.device("cpu"))
        engines.append(engine)
        models.append(own)
    prepare(engines)
    total = sum(labels(ids) for replica in batches for ids in replica)

    def run(rank: int) -> float:
        engine, own = engines[rank], models[rank]
        loss = 0.0
        for _ in range(steps):
            own.zero_grad()
            mine = batches[layout.index_of(rank)] if engine.is_attention else []
            work = [user_step(own, ids, labels(ids) / total) for ids in mine]
            count = engine.agree(len(mine), 0.0).micro_batches
            results = engine.run(work, count, training=True)
            loss = sum(result.item() * step.weight for result, step in zip(results, work, strict=True))
        if engine.is_attention:
            sum_over_replicas([p for p in own.parameters() if p.device.type != "meta"], engine.collectives)
        return loss

    losses = network.run([lambda rank=rank: run(rank) for rank in range(layout.world)])
    return Outcome(sum(losses), gather_gradients(models, layout, model), engines, network)


def user_step(model: nn.Module, ids: Tensor, weight: float) -> UserStep:
    return UserStep(
        function=lambda: micro_batch_loss(model, ids), around=nullcontext, weight=weight, loss_of=lambda result: result
    )


def gather_gradients(models: list[nn.Module], layout: Layout, whole: nn.Module) -> dict[str, Tensor]:
    """Gradients of A rank 0 and of all experts, in the shapes of the whole model."""
    grads = {name: p.grad for name, p in models[0].named_parameters() if p.device.type != "meta" and p.grad is not None}
    experts = {layer.name: layer for layer in find_moe_layers(whole)}
    for name, parameter in whole.named_parameters():
        layer = next((l for key, l in experts.items() if name.startswith(key + ".") and ".experts." in name), None)
        if layer is None:
            continue
        expert_map = ExpertMap.contiguous(layer.num_experts, layout.ffn)
        grads[name] = torch.zeros_like(parameter)
        for index in range(layout.ffn):
            local = dict(models[layout.attention + index].named_parameters())[name]
            grads[name][list(expert_map.rank_to_experts(index))] = local.grad
    return grads


def labels(ids_BS: Tensor) -> int:
    return ids_BS[:, 1:].numel()


def worst_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest |got - want| relative to the largest |want| of that parameter; infinite for a missing one."""
    if got.keys() != want.keys():
        return float("inf")
    return max(((got[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-30)).item() for name in want)
