"""What the cost model reads out of transformers' configurations, against the models that are made from them."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tiny import hf_config, tiny_hf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_afd.cost.config import FAMILIES, model_shape
from lightning_afd.cost.model import ModelShape, flops_of
from lightning_afd.errors import PlanError
from lightning_afd.recipes.shapes import model_fields
from lightning_afd.recipes.tiny_models import tiny_config

PUBLISHED = {
    "deepseek_moe_16b": 16_375_728_128,  # safetensors of deepseek-ai/deepseek-moe-16b-base
    "deepseek_v2_lite": 15_706_484_224,  # safetensors of deepseek-ai/DeepSeek-V2-Lite
    "deepseek_v3": 671_000_000_000,  # 2412.19437, without the multi-token prediction module
    "qwen3_30b_a3b": 30_532_122_624,  # safetensors of Qwen/Qwen3-30B-A3B
    "qwen3_235b_a22b": 235_093_634_560,  # safetensors of Qwen/Qwen3-235B-A22B
    "gpt_oss_20b": 20_910_000_000,  # 2508.10925, table 1
    "gpt_oss_120b": 116_830_000_000,
    "gpt_oss_paper": 116_830_000_000,
    "qwen3_paper": 235_093_634_560,
}
CLASSES = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (r"\.experts\.", "experts"),
    (r"shared_expert", "shared"),
    (r"\.(gate|router)\.", "router"),
    ("self_attn", "attention"),
    ("norm", "norm"),
    (r"\.mlp\.", "dense"),
)


@pytest.fixture(autouse=True)
def foreign_warnings() -> Iterator[None]:
    """Models of transformers warn about their own defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def on_meta(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def by_class(model: nn.Module) -> dict[str, int]:
    found = Counter[str]()
    for name, parameter in model.named_parameters():
        found[next(kind for pattern, kind in CLASSES if re.search(pattern, name))] += parameter.numel()
    return dict(found)


def counted(shape: ModelShape) -> dict[str, int]:
    return {kind: number for kind, number in asdict(shape.parameters()).items() if number}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_of_every_family(model_type: str) -> None:
    config = tiny_config(model_type)
    assert counted(model_shape(config.to_dict())) == by_class(on_meta(config))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0], "tie_word_embeddings": True}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True}),
        ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2}),
        ("deepseek_v3", {"first_k_dense_replace": 2, "attention_bias": True}),
        ("gpt_oss", {"head_dim": 16, "num_attention_heads": 6}),
    ],
)
def test_parameters_of_other_settings(model_type: str, settings: dict[str, Any]) -> None:
    config = hf_config(model_type, **settings)
    assert counted(model_shape(config.to_dict())) == by_class(on_meta(config))


@pytest.mark.parametrize("name", [*PUBLISHED, "deepseek_moe_paper"])
def test_published_models(name: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**model_fields(name))
    shape, found = model_shape(config.to_dict()), by_class(on_meta(config))
    assert counted(shape) == found
    total = sum(found.values())
    assert shape.parameters().total == total
    assert total == pytest.approx(PUBLISHED.get(name, total), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "top_k", "hidden", "width"),
    [
        ("deepseek_moe_paper", 28, 64, 4, 2048, 1408),
        ("gpt_oss_paper", 36, 128, 4, 2880, 2880),
        ("qwen3_paper", 94, 128, 8, 4096, 1536),
    ],
)
def test_the_paper_models(name: str, layers: int, experts: int, top_k: int, hidden: int, width: int) -> None:
    from transformers import AutoConfig

    shape = model_shape(AutoConfig.for_model(**model_fields(name)).to_dict())
    assert (len(shape.layers), shape.hidden) == (layers, hidden)
    assert {(e.experts, e.top_k, e.width, bool(e.shared)) for e in shape.moe} == {(experts, top_k, width, False)}
    assert {layer.attention.window for layer in shape.layers} == {0}


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2_lite", "gpt_oss_120b", "gpt_oss_paper", "qwen3_30b_a3b"])
def test_fields_of_a_file_say_as_much_as_transformers(name: str) -> None:
    """Plans are made without transformers, from what conf/model says alone."""
    from transformers import AutoConfig

    fields = model_fields(name)
    assert model_shape(fields) == model_shape(AutoConfig.for_model(**fields).to_dict())


def test_windows_follow_the_layers_types() -> None:
    from transformers import AutoConfig

    shape = model_shape(AutoConfig.for_model(**model_fields("gpt_oss_20b")).to_dict())
    assert [layer.attention.window for layer in shape.layers] == [128, 0] * 12
    sliding = hf_config("mixtral", sliding_window=5)
    assert {layer.attention.window for layer in model_shape(sliding.to_dict()).layers} == {5}


def without_mask(shape: ModelShape, rows: int, length: int) -> float:
    """Forward FLOPs of eager attention, which computes all scores."""
    core = sum(layer.attention.core_flops(length) for layer in shape.layers)
    matrices = sum(flops_of(layer.attention_side(shared=True)) for layer in shape.layers)
    return rows * length * (matrices + core + sum(e.flops for e in shape.moe) + shape.head.flops)


def measured(model: nn.Module, ids: torch.Tensor, *, backward: bool) -> int:
    """FLOPs by torch's counter, without those by which rotary embeddings multiply positions and frequencies."""
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if backward:
            loss.backward()
    by_module = counter.get_flop_counts()
    rotary = next((sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb")), 0)
    return counter.get_total_flops() - rotary


FLOP_CASES = [
    ("qwen3_moe", {"head_dim": 24, "mlp_only_layers": [1]}),
    ("gpt_oss", {}),
    ("mixtral", {}),
    ("olmoe", {}),
    ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", {"v_head_dim": 12}),
    ("qwen2_moe", None),
    ("glm4_moe", None),
]


@pytest.mark.parametrize(("model_type", "settings"), FLOP_CASES)
def test_flops_against_the_counter(model_type: str, settings: dict[str, Any] | None) -> None:
    from transformers import AutoModelForCausalLM

    if settings is None:
        config = tiny_config(model_type)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", attn_implementation="eager")
    else:
        model = tiny_hf(model_type, **settings)
        config = model.config
        model.set_attn_implementation("eager")
    shape, ids = model_shape(config.to_dict()), torch.arange(20).view(2, 10) % 7
    forward = without_mask(shape, 2, 10)
    assert measured(model, ids, backward=False) == forward
    assert measured(model, ids, backward=True) == 3 * forward  # as much for input gradients, as much for weights


def test_model_flops_are_causal() -> None:
    shape = model_shape(hf_config("gpt_oss", sliding_window=4).to_dict())
    by_hand = 0
    for layer in shape.layers:
        window = layer.attention.window or 10
        by_hand += sum(min(i + 1, window) for i in range(10)) * 2 * 2 * layer.attention.query_width
    core_free = shape.forward_flops([1] * 10) - sum(layer.attention.core_flops(1) for layer in shape.layers) * 10
    assert shape.forward_flops([10]) == core_free + by_hand
    assert shape.step_flops([10, 3]) == pytest.approx(3 * (shape.forward_flops([10]) + shape.forward_flops([3])))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(
        PlanError, match="the shapes of model_type='nosuch' can't be read; known: deepseek_v2, deepseek"
    ):
        model_shape({"model_type": "nosuch"})
    with pytest.raises(PlanError, match="a mixtral has none of the fields num_local_experts, num_experts"):
        config = hf_config("mixtral").to_dict()
        model_shape({**config, "num_local_experts": None})


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [
        ({"moe_intermediate_size": 17}, {"experts", "shared"}),
        ({"first_k_dense_replace": 0}, {"experts", "shared", "router", "dense"}),
        ({"v_head_dim": 9}, {"attention"}),
        ({"tie_word_embeddings": True}, {"head"}),
    ],
)
def test_the_comparisons_see_a_wrong_reading(changed: dict[str, Any], kinds: set[str]) -> None:
    config = hf_config("deepseek_v3").to_dict()
    right, wrong = counted(model_shape(config)), counted(model_shape({**config, **changed}))
    assert {kind for kind in right | wrong if right.get(kind) != wrong.get(kind)} == kinds
    same_flops = without_mask(model_shape(config), 1, 8) == without_mask(model_shape({**config, **changed}), 1, 8)
    assert same_flops == (kinds == {"head"})  # a tied head is multiplied with all the same
