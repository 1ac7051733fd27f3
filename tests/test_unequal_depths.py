"""Other numbers of attention groups than of groups of experts: loss and gradients equal the plain loop, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, micro_batch_loss, plain_step, user_step
from tiny import TinyLayer, TinyMoE, tiny, tiny_hf
from torch import Tensor

from lightning_afd.attention_hops import AttentionHops
from lightning_afd.model.place import is_owned
from lightning_afd.model.port import suspended_layers
from lightning_afd.placement import Head, Layout
from lightning_afd.schedule.orders import ORDERS

TOLERANCE = 1e-12
PAIRS = [(1, 2), (2, 1), (1, 3), (3, 2)]
Pair = tuple[int, int]


def model_of(**sizes: Any) -> TinyMoE:
    """A small float64 model whose number of MoE layers no number of groups divides."""
    return tiny(**{"layers": 5, "hidden": 8, "expert_width": 4, "aux": 0.05, **sizes}).double()


def layout_of(groups: Pair, ranks: int = 1, head: Head = "attention") -> Layout:
    return Layout(attention=ranks, ffn=ranks, groups=groups, head=head)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", PAIRS)
def test_step_equals_the_plain_loop(groups: Pair, order: str) -> None:
    """With an auxiliary loss and tied weights; the number of micro-batches is no multiple of anything."""
    model, batches = model_of(tied=True), make_batches(1, 5)
    job = LocalJob(model, layout_of(groups), order, micro_batches=5, split_attention=order == "zero-bubble")
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


@pytest.mark.parametrize("head", ["attention", "ffn"])
@pytest.mark.parametrize("groups", [(1, 2), (2, 1)])
def test_everything_else(groups: Pair, head: Head) -> None:
    """Several ranks per group, dense layers, shared experts on F ranks, recompute."""
    model, batches = model_of(dense=(3,), dense_first=1, shared_expert=True), make_batches(2, 2)
    choices = {"recompute": "attention", "recompute_experts": True, "shared_experts": "ffn"}
    job = LocalJob(model, layout_of(groups, 2, head), **choices)
    for _ in range(2):  # the first step looks at the layers, the second doesn't
        assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


@pytest.mark.parametrize("head", ["attention", "ffn"])
@pytest.mark.parametrize("groups", PAIRS)
def test_evaluation_equals_the_plain_model(groups: Pair, head: Head) -> None:
    model, ((ids_BS,),) = model_of(), make_batches(1, 1)
    layout = layout_of(groups, 1, head)
    job = LocalJob(model, layout)
    with torch.no_grad():
        work = [[user_step(job.models[rank], ids_BS)] for rank in range(layout.attention_groups)]
        tails = [[user_step(job.models[layout.tail_rank(0)], ids_BS)]]
        ((found,),) = job.run(work, tails=tails, training=False)
        assert found.item() == pytest.approx(micro_batch_loss(model, ids_BS).item(), rel=1e-12)


@pytest.mark.parametrize("groups", PAIRS)
def test_each_parameter_lives_where_its_layer_does(groups: Pair) -> None:
    layout = layout_of(groups)
    job = LocalJob(model_of(), layout)
    kept = [{name for name, p in own.named_parameters() if is_owned(p)} for own in job.models]
    assert sum(map(len, kept)) == len(set().union(*kept)) == len(dict(model_of().named_parameters()))
    for rank, names in enumerate(kept):
        worker = layout.worker_of(rank)
        number = layout.attention_groups if worker.role == "A" else layout.ffn_groups
        found = {int(name.split(".")[1]) for name in names if name.startswith("layers.")}
        assert found == set(range(worker.group, 5, number))
        assert all((".experts." in name) == (worker.role == "F") for name in names)


@pytest.mark.parametrize("groups", [(1, 2), (2, 1)])
def test_a_model_of_transformers(groups: Pair) -> None:
    model, batches = tiny_hf("qwen3_moe", aux=0.1).double(), make_batches(1, 2)
    assert LocalJob(model, layout_of(groups)).step(batches).difference(*plain_step(model, batches)) < TOLERANCE


class ScaledLayer(TinyLayer):
    """Not additive: what the experts return passes through a tanh."""

    def forward(self, h_BSH: Tensor) -> Tensor:
        return super().forward(h_BSH).tanh()


def test_layers_that_wait_inside_for_their_experts_need_one_attention_group() -> None:
    model, batches = model_of(layers=3), make_batches(1, 2)
    for layer in model.layers:
        layer.__class__ = ScaledLayer
    job = LocalJob(model, layout_of((1, 2)))
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE
    assert len(suspended_layers(job.models[0])) == 3


def test_comparison_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hop that brings back nothing, and experts of one group that are others than those of the plain loop."""
    model, batches = model_of(aux=0.0), make_batches(1, 2)
    want = plain_step(model, batches)
    job = LocalJob(model, layout_of((1, 2)))
    with torch.no_grad():
        for name, parameter in job.models[2].named_parameters():
            if is_owned(parameter) and name.startswith("layers.3."):
                parameter.mul_(1.01)
    assert job.step(batches).difference(*want) > 1e-5

    take = AttentionHops._hop_gradient

    def lose(self: AttentionHops, action: Any) -> None:
        take(self, action)
        flight = self._flight[action.micro_batch]
        if self._peers.receives(action) and flight.dh_TH is not None:
            flight.dh_TH = torch.zeros_like(flight.dh_TH)

    monkeypatch.setattr(AttentionHops, "_hop_gradient", lose)
    assert LocalJob(model, layout_of((1, 2))).step(batches).difference(*want) < TOLERANCE  # it has no hops
    assert LocalJob(model, layout_of((2, 1))).step(batches).difference(*want) > 1e-3
