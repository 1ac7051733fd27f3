"""Which tensor is a layer's expert bias, its dtype, and how far it moves."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.model.expert_bias import ExpertBias, find_biases, kept_in_float32
from lightning_afd.model.split import find_moe_layers
from lightning_afd.recipes.tiny_models import build

PLACES = {
    "deepseek_v3": "mlp.gate.e_score_correction_bias",
    "minimax_m2": "mlp.e_score_correction_bias",
    "ernie4_5_moe": "mlp.gate.moe_statics.e_score_correction_bias",
    "laguna": "mlp.gate.e_score_correction_bias",
    "lfm2_moe": "feed_forward.expert_bias",
    "afmoe": "mlp.expert_bias",
}
"""A buffer of the router, of the block, of a part of the router, and parameters without gradient."""


@pytest.mark.parametrize("name", PLACES)
def test_transformers_models(name: str) -> None:
    layers = find_moe_layers(build(name, torch.bfloat16))
    biases = find_biases(layers)
    assert [bias.layer for bias in biases] == [layer.index for layer in layers]
    with kept_in_float32(biases):
        pass
    for layer, bias in zip(layers, biases, strict=True):
        parent, _, last = PLACES[name].rpartition(".")
        assert bias.tensor is getattr(layer.layer.get_submodule(parent), last)
        bias.move(torch.tensor([0, 1, 2, 5]), 1e-3)
        assert bias.tensor.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_models_without_a_bias_are_refused(name: str) -> None:
    model = tiny_hf(name).requires_grad_(False)  # a frozen router's bias is none
    with pytest.raises(PlanError, match=r"model\.layers\.0 and the other MoE layers have no bias to move"):
        find_biases(find_moe_layers(model))


class Holder(nn.Module):
    """Something with a bias of four experts."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.bias_of_experts = nn.Buffer(value)


def held(value: Tensor) -> ExpertBias:
    return ExpertBias(layer=0, module=Holder(value), name="bias_of_experts")


def test_the_sign_of_the_exact_difference_decides() -> None:
    bias = held(torch.zeros(4))
    bias.move(torch.tensor([2**40 + 1, 2**40, 2**40, 2**40 - 1]), 0.5)
    assert bias.tensor.tolist() == [-0.5, 0.0, 0.0, 0.5]
    bias.move(torch.tensor([4, 0, 0, 0]), 0.5)
    assert bias.tensor.tolist() == [-1.0, 0.5, 0.5, 1.0]


def test_a_bias_of_another_rank_stays_without_storage() -> None:
    bias = held(torch.zeros(4, device="meta"))
    with kept_in_float32([bias]):
        pass
    bias.move(torch.tensor([4, 0, 0, 0]), 0.5)
    assert bias.tensor.is_meta


def test_values_survive_a_change_to_half_precision() -> None:
    bias = held(torch.tensor([0.1, 1.001, -0.3, 2.0]))
    before = bias.tensor.clone()
    with kept_in_float32([bias]):
        bias.module.to(torch.bfloat16)
    assert torch.equal(bias.tensor, before)
    bias.module.to(torch.bfloat16)
    assert not torch.equal(bias.tensor.float(), before)


def test_tiny_has_none() -> None:
    with pytest.raises(PlanError, match="a buffer of 4 numbers such as e_score_correction_bias"):
        find_biases(find_moe_layers(tiny()))
