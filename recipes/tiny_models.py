"""Tiny models of any transformers architecture: their configurations are shrunk by rules over the names of fields.

A field's first matching rule gives its new value; a few models need settings of their own where no rule can know them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

LAYERS = 4
VOCABULARY = 64
FIRST_SPECIAL = 40
"""Special tokens (image, padding, ...) get ids from here on; the survey's texts stay below."""

_RULES: tuple[tuple[str, int | float], ...] = (
    (r".*vocab_size.*", VOCABULARY),
    (r"num_hidden_layers|n_layers|num_layers|depth|encoder_layers|max_window_layers", LAYERS),
    (r"first_k_dense_replace|num_dense_layers|prefix_dense_.*|moe_layer_start_index", 1),
    (r"num_nextn_predict_layers", 0),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"\w*router_hidden_size|hidden_size_per_layer_input|\w*_embed_dim", 16),
    (r"hidden_size|d_model|out_hidden_size|output_dim", 32),
    (r"n_group|topk_group|num_expert_group|n_groups", 1),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|\w*_experts_per_tok", 2),
    (r"(moe_)?(num|n)_shared_experts|zero_expert_num", 1),
    (r"(\w+_)?(num_experts|num_local_experts|n_routed_experts)", 4),
    (r"\w*(key_value|kv)_n?_?heads|linear_num_key_heads|\w*key_heads", 2),
    (r"\w*(attention_heads|num_heads|n_heads|value_heads)", 4),
    (r"qk_head_dim", 16),
    (r"\w*(head_dim|d_head)|kv_channels|d_rel", 8),
    (r"\w*(_rank|lowrank)", 16),
    (r"rotary_dim", 8),
    (r"(moe|expert|shared)\w*(intermediate_size|hidden_size|ffn_hidden_size|dim)", 16),
    (r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|intermediate_size_mlp)", 32),
    (r"\w*(window|window_size|block_size|chunk_size|attention_chunk_size)", 4),
    (r"\w*d_state|ssm_state_size", 8),
    (r"\w*index_topk\w*", 4),
    (r"\w*(dropout|pdrop|jitter_noise)", 0.0),
    (r"initializer_range", 0.2),
    (r"router_aux_loss_coef|moe_loss_weight", 0.05),
)

_MISSING: dict[str, int] = {
    "head_dim": 8,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts": 4,
    "top_k_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
"""Fields that are None by default and that a model cannot do without."""

EXTRAS: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bailing_hybrid": {"layer_group_size": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "glm5_next": {"text_config.index_kpool": 2},
    "mistral4": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        }
    },
    "dots1": {"n_shared_experts": 1},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "gemma4_text": {"enable_moe_block": True},
    "hunyuan_v1_moe": {"num_experts": 4},
    "step3p7": {"text_config.sliding_window": 4},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "glm4v_moe": {
        "text_config.rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]}
    },
    "hy_v4_vl": {"text_config.rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "muse_spark": {"projector_hidden_size": 32, "audio_config.hidden_sizes": [8, 8, 8, 8]},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}
"""Settings of single models, by model type; dots go into nested configurations."""


def moe_models() -> list[str]:
    """Model types of transformers whose code has a class for experts, one per architecture: its causal text model.

    Where there is no causal language model, it is the one that reads images too.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    folder, by_module = Path(transformers.__file__).parent / "models", dict[str, list[str]]()
    for model_type in CONFIG_MAPPING_NAMES:
        module = model_type_to_module_name(model_type)
        code = "".join(file.read_text() for file in (folder / module).glob("modeling_*.py"))
        if _auto_class(model_type) is not None and re.search(r"^class \w*Experts?\w*\(", code, re.MULTILINE):
            by_module.setdefault(module, []).append(model_type)
    return sorted(_text_model(types) for types in by_module.values())


def build(model_type: str, dtype: torch.dtype) -> nn.Module:
    """A seeded tiny model in train mode."""
    import transformers

    config = tiny_config(model_type)
    auto = getattr(transformers, str(_auto_class(model_type)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = auto.from_config(config, experts_implementation="eager", attn_implementation="eager")
        except ValueError:  # some have sdpa only
            model = auto.from_config(config, experts_implementation="eager")
        _fill(model)
    return model.train().to(dtype)


def tiny_config(model_type: str) -> Any:
    """The configuration of `model_type` with a few small layers and experts, and its auxiliary loss switched on."""
    from transformers import AutoConfig

    whole = AutoConfig.for_model(model_type).to_dict()
    extras = nested(EXTRAS.get(model_type, {}))
    small = merged(_shrunk(whole), extras)
    built = AutoConfig.for_model(model_type, **small).to_dict()
    config = AutoConfig.for_model(model_type, **merged(small, merged(_cut(whole, built), extras)))
    for part in (config, config.get_text_config()):
        if hasattr(part, "router_aux_loss_coef"):
            part.output_router_logits = True
    return config


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return out


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second one's values where they differ, nested dictionaries merged."""
    out = dict(first)
    for name, value in second.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = merged(out[name], value) if both else value
    return out


def _shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that a rule changes, nested configurations included."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if _is_config(name, value):
            out[name] = {**({"model_type": value["model_type"]} if "model_type" in value else {}), **_shrunk(value)}
        elif re.fullmatch(r"\w*token_(id|index)", name) and value is not None:
            out[name] = _special_token(value, len(out))
        elif name == "rope_parameters" and isinstance(value, dict):
            out |= {name: _small_rope(value)} if "mrope_section" in str(value) else {}
        elif value is None and name in _MISSING:
            out[name] = _MISSING[name]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            small = _ruled(name, value)
            if name == "num_key_value_heads" and value == fields.get("num_attention_heads"):
                small = _ruled("num_attention_heads", value)
            if small != value:
                out[name] = small
    return out


def _small_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Multimodal rotary sections (time, height, width) for a rotary width of 8: they share its 4 frequencies."""
    return {
        name: [2, 1, 1] if name == "mrope_section" else _small_rope(value) if isinstance(value, dict) else value
        for name, value in rope.items()
    }


def _ruled(name: str, value: float) -> float:
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return small if isinstance(small, float) else min(small, value)
    return value


def _special_token(value: Any, seed: int) -> int:
    first = value[0] if isinstance(value, list) else value
    inside = isinstance(first, int) and first < FIRST_SPECIAL
    return first if inside else FIRST_SPECIAL + seed % (VOCABULARY - FIRST_SPECIAL)


def _cut(whole: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with one entry per layer, cut to the layers that are left; every kind of entry stays if possible."""
    layers = next((whole[name] for name in ("num_hidden_layers", "n_layers", "num_layers") if name in whole), None)
    out: dict[str, Any] = {}
    for name, value in built.items():
        if _is_config(name, value):
            inner = _cut(whole[name], value)
            out |= {name: inner} if inner else {}
        elif isinstance(value, list) and _per_layer(whole.get(name), layers):
            kinds = isinstance(whole[name][0], str)
            out |= {name: _first_of_each_kind(whole[name])} if kinds or len(value) != LAYERS else {}
    return out


def _per_layer(value: Any, layers: int | None) -> bool:
    return isinstance(value, list) and bool(value) and len(value) == layers


def _first_of_each_kind(entries: list[Any]) -> list[Any]:
    first = {repr(entry): index for index, entry in reversed(list(enumerate(entries)))}
    chosen = sorted(first.values())[:LAYERS]
    rest = [index for index in range(len(entries)) if index not in chosen]
    rest.sort(key=lambda index: index < chosen[-1])  # those behind the last new kind first: dense layers lead
    return [entries[index] for index in sorted(chosen + rest[: LAYERS - len(chosen)])]


def _is_config(name: str, value: Any) -> bool:
    return isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config"


def _auto_class(model_type: str) -> str | None:
    """The class that builds a language model of this type, if there is one."""
    from transformers.models.auto import modeling_auto

    if model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "AutoModelForCausalLM"
    found = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return "AutoModelForImageTextToText" if found else None


def _text_model(model_types: list[str]) -> str:
    causal = [name for name in model_types if _auto_class(name) == "AutoModelForCausalLM"]
    return next((name for name in causal if name.endswith("_text")), (causal or model_types)[0])


def _fill(model: nn.Module) -> None:
    """Give weights that a model leaves empty or zero some values, and hash routers a table."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.isnan().any() or (parameter.dim() > 1 and not parameter.any()):
                nn.init.normal_(parameter, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.stack([torch.randperm(4)[: buffer.shape[1]] for _ in buffer]))
