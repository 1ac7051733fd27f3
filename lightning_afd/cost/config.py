"""Shapes out of a transformers configuration, given as the plain dict of `config.to_dict()`.

An architecture stands in `FAMILIES` once its counts have been compared with a model built from it; others are refused,
as a field of the same name may mean something else there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from lightning_afd.cost.model import AttentionShape, ExpertsShape, LayerShape, Linear, ModelShape, mlp
from lightning_afd.errors import PlanError

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What the code of an architecture does beyond its configuration."""

    qk_norm: Literal["none", "head", "full", "switch"] = "none"
    """Queries and keys are normed per head, over their full width, or per head where `use_qk_norm` says so."""
    qkv_bias: str = "attention_bias"
    """Field that gives the projections to queries, keys and values a bias."""
    output_bias: bool = True
    """Whether the projection back has one, too, where the field says so."""
    sinks: bool = False
    biased_experts: bool = False
    """Router and experts have biases."""
    alternate_windows: bool = False
    """Without `layer_types` each other layer has a window, from the first one on."""


FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "deepseek_v2": _Family(),
        "deepseek_v3": _Family(),
        "dots1": _Family(qk_norm="head"),
        "glm4_moe": _Family(qk_norm="switch", output_bias=False),
        "gpt_oss": _Family(sinks=True, biased_experts=True, alternate_windows=True),
        "granitemoe": _Family(),
        "minimax_m2": _Family(qk_norm="full"),
        "mixtral": _Family(),
        "olmoe": _Family(qk_norm="full"),
        "qwen2_moe": _Family(qkv_bias="qkv_bias", output_bias=False),
        "qwen3_moe": _Family(qk_norm="head"),
    }
)
"""What can be read, by model type."""


def model_shape(config: Config) -> ModelShape:
    """The shapes of the language model of a configuration; raises PlanError for an unknown model type."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise PlanError(f"the shapes of model_type={model_type!r} can't be read; known: {', '.join(FAMILIES)}")
    family, hidden = FAMILIES[model_type], int(config["hidden_size"])
    return ModelShape(
        hidden=hidden,
        vocab=int(config["vocab_size"]),
        layers=tuple(_layer(config, family, index) for index in range(config["num_hidden_layers"])),
        tied=bool(config.get("tie_word_embeddings")),
        final_norm_parameters=hidden,
    )


def _layer(config: Config, family: _Family, index: int) -> LayerShape:
    hidden = int(config["hidden_size"])
    window = _window(config, family, index)
    latent = bool(config.get("kv_lora_rank"))
    attention = _latent(config, window) if latent else _grouped(config, family, window)
    if _is_dense(config, index):
        return LayerShape(
            attention=attention, dense=mlp(hidden, config["intermediate_size"]), norm_parameters=2 * hidden
        )
    return LayerShape(attention=attention, experts=_experts(config, family), norm_parameters=2 * hidden)


def _grouped(config: Config, family: _Family, window: int) -> AttentionShape:
    """Grouped-query attention (2305.13245): q and k/v have their own numbers of heads, q's width may differ from H."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // heads)
    query, key = heads * head, int(config.get("num_key_value_heads") or heads) * head
    bias = bool(config.get(family.qkv_bias))
    norms = {"none": 0, "head": 2 * head, "full": query + key, "switch": 2 * head * bool(config.get("use_qk_norm"))}
    normed = norms[family.qk_norm]
    return AttentionShape(
        linears=(
            Linear(hidden, query, bias),
            Linear(hidden, key, bias),
            Linear(hidden, key, bias),
            Linear(query, hidden, bias and family.output_bias),
        ),
        query_width=query,
        value_width=query,
        kv_width=2 * key,
        other_parameters=normed + (heads if family.sinks else 0),
        normed_width=query + key if normed else 0,
        saved_width=2 * query + 2 * key,
        window=window,
    )


def _latent(config: Config, window: int) -> AttentionShape:
    """Latent attention (DeepSeek-V2, 2405.04434, section 2.1 and appendix C): low-rank queries (optional), low-rank
    keys and values, one rotary key for all heads. Keys and values lie in one tensor; the output is copied once."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope, nope, value = (int(config[name]) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    kv_rank, q_rank = int(config["kv_lora_rank"]), int(config.get("q_lora_rank") or 0)
    bias = bool(config.get("attention_bias"))
    query = heads * (rope + nope)
    queries = (Linear(hidden, q_rank, bias), Linear(q_rank, query)) if q_rank else (Linear(hidden, query),)
    return AttentionShape(
        linears=(
            *queries,
            Linear(hidden, kv_rank + rope, bias),
            Linear(kv_rank, heads * (nope + value)),
            Linear(heads * value, hidden, bias),
        ),
        query_width=query,
        value_width=heads * value,
        kv_width=query + heads * value,
        other_parameters=kv_rank + q_rank,
        normed_width=kv_rank + q_rank,
        saved_width=2 * query + heads * (nope + 3 * value) + kv_rank + q_rank,
        window=window,
    )


def _experts(config: Config, family: _Family) -> ExpertsShape:
    hidden = int(config["hidden_size"])
    experts = int(_first(config, "num_local_experts", "num_experts", "n_routed_experts"))
    width = int(_first(config, "moe_intermediate_size", "intermediate_size"))
    shared = int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width)
    gated = bool(config.get("shared_expert_intermediate_size"))
    bias = family.biased_experts
    return ExpertsShape(
        experts=experts,
        top_k=int(config["num_experts_per_tok"]),
        expert=tuple(Linear(inputs, outputs, bias) for inputs, outputs, _ in mlp(hidden, width)),
        router=Linear(hidden, experts, bias),
        shared=mlp(hidden, shared) if shared else (),
        shared_gate=(Linear(hidden, 1),) if gated else (),
    )


def _is_dense(config: Config, index: int) -> bool:
    """Whether a layer has no experts: `first_k_dense_replace` of DeepSeek, `mlp_only_layers` and
    `decoder_sparse_step` of Qwen."""
    if index < int(config.get("first_k_dense_replace") or 0) or index in (config.get("mlp_only_layers") or ()):
        return True
    return (index + 1) % int(config.get("decoder_sparse_step") or 1) > 0


def _window(config: Config, family: _Family, index: int) -> int:
    """Keys that a query of the layer sees at most, 0 where it sees all."""
    window = int(config.get("sliding_window") or 0)
    types = config.get("layer_types")
    if not types:
        return 0 if family.alternate_windows and index % 2 else window
    return window if types[index] == "sliding_attention" else 0


def _first(config: Config, *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise PlanError(f"the configuration of a {config['model_type']} has none of the fields {', '.join(names)}")
