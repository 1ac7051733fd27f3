"""Tiny transformers models and their Hugging Face folders for the tests of import and export."""

import warnings
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_hf
from torch import Tensor, nn

TIED = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""Architectures that are also tried with the embedding as head."""


def whole_model(name: str, *, tied: bool = False) -> Any:
    """A seeded tiny model whose buffers, such as DeepSeek-V3's bias of the router, are not zero."""
    model = tiny_hf(name, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return model


def loaded(folder: Path, **options: Any) -> Any:
    """What transformers itself makes of a folder; a weight that it would start anew is an error."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, experts_implementation="eager", **options
        )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that a state dict holds."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bit for bit, dtypes included."""
    assert got.keys() == want.keys()
    wrong = [name for name in want if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name])]
    assert not wrong, wrong
