"""Attention inside documents only, also in models of transformers that don't look at the positions for their masks.

transformers reads the borders of packed documents off positions that restart, unless a cache is made or the model
leaves the positions out where it makes its masks: then documents would silently see one another. Flash attention needs
no mask; it takes the borders from `cu_seq_lens_q` and `cu_seq_lens_k`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

LEAVE_POSITIONS_OUT = ("afmoe", "gpt_oss")
"""Model types whose masks are made without positions (transformers 5.24); they take ready ones by type of layer."""


def separate_documents(model: nn.Module) -> None:
    """Make a transformers model keep documents apart in batches with `position_ids` and no attention mask.

    It acts on calls of the model's decoder: no cache is made for such a batch, and masks are made from the positions
    where the model would not do so itself.
    """
    decoder = getattr(model, "base_model", model)
    if _before_forward not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    given = [name for name in ("attention_mask", "cache", "past_key_values") if kwargs.get(name) is not None]
    if kwargs.get("position_ids") is None or given:
        return None
    config: Any = decoder.config
    changed = {**kwargs, "use_cache": False}
    if config.model_type in LEAVE_POSITIONS_OUT and "flash" not in config._attn_implementation:
        changed["attention_mask"] = _masks(decoder, kwargs["position_ids"])
    return args, changed


def _masks(decoder: Any, positions_BS: Any) -> dict[str, Any]:
    """By type of layer, as the models that are named above make them, with positions."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    batch: dict[str, Any] = {
        "config": decoder.config,
        "inputs_embeds": positions_BS.new_empty((*positions_BS.shape, 0), dtype=decoder.dtype),  # its shape is read
        "attention_mask": None,
        "cache": None,
        "position_ids": positions_BS,
    }
    return {
        "full_attention": create_causal_mask(**batch),
        "sliding_attention": create_sliding_window_causal_mask(**batch),
    }
