"""Where the experts of a model are, what each rank keeps of it, and which models are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import HF, TinyConfig, TinyExperts, TinyMoE, tiny, tiny_hf
from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.model.place import keep_attention, keep_experts, owned_bytes
from lightning_afd.model.split import MoELayer, decoder_layers, find_moe_layers


def expert_parameters(layers: Sequence[MoELayer]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.experts.parameters()]


def refusal(model: nn.Module) -> str:
    with pytest.raises(PlanError) as failure:
        find_moe_layers(model)
    return str(failure.value)


def test_layers_are_listed_in_order_without_the_dense_ones() -> None:
    model = nn.ModuleDict({"wrapped": tiny(layers=4, dense_first=1, experts=5, top_k=3)})
    layers = find_moe_layers(model)
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert [layer.name for layer in layers] == [f"wrapped.layers.{index}" for index in (1, 2, 3)]
    assert all((layer.num_experts, layer.top_k) == (5, 3) for layer in layers)
    assert all(layer.layer is model.get_submodule(layer.name) for layer in layers)
    assert all(layer.experts is layer.layer.mlp.experts for layer in layers)


@pytest.mark.parametrize("name", HF)
def test_layers_of_transformers_models(name: str) -> None:
    model = tiny_hf(name)
    layers = find_moe_layers(model)
    dense = 1 if name.startswith("deepseek") else 0
    assert [layer.name for layer in layers] == [f"model.layers.{index}" for index in range(dense, dense + len(layers))]
    assert len(layers) == model.config.num_hidden_layers - dense
    assert {(layer.num_experts, layer.top_k) for layer in layers} == {(8 if name == "olmoe" else 4, 2)}


def test_model_without_experts_is_refused() -> None:
    message = refusal(tiny(layers=2, dense_first=2))
    assert message.startswith("TinyMoE has no routed experts") and "another strategy" in message


def test_more_experts_per_token_than_experts_are_refused() -> None:
    model = tiny(layers=2, experts=3, top_k=2)
    model.layers[1].mlp.router.top_k = 4
    assert "layer layers.1 routes each token to 4 of 3 experts: choose top_k <= 3" in refusal(model)


def test_two_stacks_are_refused() -> None:
    model = nn.ModuleDict({"encoder": tiny(layers=1), "decoder": tiny(layers=2)})
    assert "in 2 stacks of layers (decoder.layers, encoder.layers)" in refusal(model)


def test_experts_outside_of_a_list_of_layers_are_refused() -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"experts": TinyExperts(TinyConfig())})})
    assert "the experts block.experts belong to no list of decoder layers" in refusal(model)


def test_two_experts_modules_in_one_layer_are_refused() -> None:
    model = tiny(layers=2)
    model.layers[1].more = TinyExperts(TinyConfig())
    assert refusal(model).startswith("layer layers.1 has two modules with routed experts")


def on_meta(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.is_meta]


def test_attention_rank_keeps_everything_but_the_experts() -> None:
    whole = tiny(layers=2, tied=True, shared_expert=True)
    own = copy.deepcopy(whole)
    kept = dict(own.named_parameters())
    layers = find_moe_layers(own)
    keep_attention(own, decoder_layers(own, layers), range(3))
    assert on_meta(own) == [name for name, _ in whole.named_parameters() if ".experts." in name]
    for name, parameter in own.named_parameters():
        assert parameter.shape == kept[name].shape
        assert parameter.is_meta or parameter is kept[name]
    assert own.lm_head.weight is own.embedding.weight
    assert all(parameter.is_meta for parameter in expert_parameters(layers))


@pytest.mark.parametrize("expert_to_rank", [(0, 0, 0, 1, 1), (1, 0, 2, 0, 2), (0, 1, 2, 1, 0)])
def test_ffn_ranks_together_keep_the_experts(expert_to_rank: tuple[int, ...]) -> None:
    whole = tiny(layers=2, experts=5, tied=True, shared_expert=True)
    ranks = max(expert_to_rank) + 1
    maps = [ExpertMap(expert_to_rank)] * 2
    seen = torch.zeros(2, 5, dtype=torch.int64)
    total = 0
    for index in range(ranks):
        own = copy.deepcopy(whole)
        keep_experts(own, find_moe_layers(own), maps, index)
        experts = maps[0].rank_to_experts(index)
        assert on_meta(own) == [name for name, _ in whole.named_parameters() if ".experts." not in name]
        assert own.lm_head.weight is own.embedding.weight
        for number, (mine, all_) in enumerate(zip(own.layers, whole.layers, strict=True)):
            assert mine.mlp.experts.num_experts == len(experts)
            for part in ("gate_up_proj", "down_proj"):
                weight = getattr(mine.mlp.experts, part)
                assert torch.equal(weight, getattr(all_.mlp.experts, part)[list(experts)])
                assert weight.untyped_storage().nbytes() == weight.numel() * 4  # no view of the whole
            seen[number, list(experts)] += 1
        total += owned_bytes(own)
    assert (seen == 1).all()
    assert total == sum(p.numel() * 4 for p in expert_parameters(find_moe_layers(whole)))


def test_parameters_on_meta_keep_name_shape_flag_and_marks() -> None:
    """configure_optimizers of the user may sort parameters by any of them, on every rank."""
    model = tiny(layers=1).double()
    marked: Any = dict(model.named_parameters())
    for number, parameter in enumerate(marked.values()):
        parameter.no_decay = number
        parameter.requires_grad_(number % 2 == 0)
    names = list(marked)
    keep_experts(model, find_moe_layers(model), [ExpertMap.contiguous(4, 2)], 0)
    after: Any = dict(model.named_parameters())
    assert list(after) == names
    for number, name in enumerate(names):
        assert (after[name].no_decay, after[name].requires_grad) == (number, number % 2 == 0)
        assert after[name].dtype == torch.float64
        if ".experts." not in name:
            assert after[name].is_meta and after[name].shape == marked[name].shape


def test_owned_bytes_count_tied_parameters_once() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(4, 4, bias=False)
            self.right = nn.Linear(4, 4, bias=False).double()
            self.tied = self.left

    assert owned_bytes(Pair()) == 16 * 4 + 16 * 8
    assert owned_bytes(Pair().to("meta")) == 0
    assert owned_bytes(TinyMoE(TinyConfig(tied=True))) < owned_bytes(TinyMoE(TinyConfig()))
