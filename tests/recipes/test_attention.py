"""The choice of an attention kernel, and what is said about a wrong one."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from fits import QUIET, Steps
from tiny import HF, tiny_hf

from lightning_afd.errors import PlanError
from lightning_afd.recipes import module as recipe
from lightning_afd.recipes.attention import Compute, automatic, check_attention, use_kernel
from lightning_afd.recipes.module import MoELanguageModel

GPU = Compute(device="cuda", dtype=torch.bfloat16, capability=(9, 0))
AMPERE = Compute(device="cuda", dtype=torch.float16, capability=(8, 6))
VOLTA = Compute(device="cuda", dtype=torch.float16, capability=(7, 0))
CPU = Compute(device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "compute", "installed", "kernel"),
    [
        ("qwen3_moe", CPU, "234", "sdpa"),
        ("qwen3_moe", GPU, "", "sdpa"),
        ("qwen3_moe", GPU, "34", "flash_attention_3"),
        ("deepseek_v3", GPU, "24", "flash_attention_2"),
        ("deepseek_v3", Compute(device="cuda", dtype=torch.float32, capability=(9, 0)), "2", "sdpa"),
        ("qwen3_moe", AMPERE, "34", "flash_attention_3"),
        ("qwen3_moe", AMPERE, "4", "sdpa"),
        ("qwen3_moe", VOLTA, "234", "sdpa"),
        ("gpt_oss", AMPERE, "234", "eager"),
        ("gpt_oss", GPU, "23", "eager"),
        ("gpt_oss", GPU, "234", "flash_attention_4"),
        ("gpt_oss", CPU, "234", "eager"),
    ],
)
def test_automatic_choice(name: str, compute: Compute, installed: str, kernel: str) -> None:
    assert automatic(tiny_hf(name), compute, lambda candidate: candidate[-1] in installed) == kernel


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_kernels_of_a_cpu_give_the_same_numbers(kernel: str) -> None:
    model: Any = tiny_hf("qwen3_moe")
    ids = torch.arange(12).view(2, 6)
    want = model(ids).logits
    assert use_kernel(model, kernel, CPU) == kernel == model.config._attn_implementation
    assert torch.allclose(model(ids).logits, want, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "attn", "compute", "words"),
    [
        ("qwen3_moe", "flash_attention_2", CPU, "needs a CUDA device, and this run computes on the cpu: choose auto"),
        (
            "qwen3_moe",
            "flash_attention_2",
            Compute(device="cuda", dtype=torch.float32, capability=(9, 0)),
            "in bfloat16 or float16, and this run in float32: choose trainer.precision=bf16-mixed",
        ),
        (
            "qwen3_moe",
            "flash_attention_2",
            VOLTA,
            r"needs a CUDA device of compute capability 8\.0, .* has 7\.0: choose",
        ),
        (
            "gpt_oss",
            "flash_attention_4",
            AMPERE,
            r"needs a CUDA device of compute capability 9\.0, .* has 8\.6: choose",
        ),
        ("gpt_oss", "flash_attention_2", GPU, "does not fit GptOssForCausalLM, which works with .*flash_attention_4"),
        ("qwen3_moe", "flash_attention_3", GPU, "needs the package flash-attn-3: install it, or choose auto"),
        ("gpt_oss", "sdpa", CPU, r"model\.attn=sdpa: GptOssForCausalLM does not support .*: choose auto"),
        ("qwen3_moe", "flex_attention", CPU, "has no gradients on a CPU"),
    ],
)
def test_a_wrong_kernel_is_one_sentence(name: str, attn: str, compute: Compute, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        use_kernel(tiny_hf(name), attn, compute)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_names_are_checked_at_once() -> None:
    check_attention("kernels-community/flash-attn3")
    with pytest.raises(PlanError, match=r"model\.attn=flash is not a choice; choices: auto, flash_attention_2, "):
        MoELanguageModel({"model_type": "qwen3_moe", **HF["qwen3_moe"]}, attn="flash")


@pytest.mark.parametrize(
    ("settings", "kernel", "said"),
    [
        ({}, "sdpa", ["attention: sdpa on cpu in 32-true (model.attn=auto)"]),
        ({"attn": "eager"}, "eager", ["attention: eager on cpu in 32-true (model.attn=eager)"]),
        ({"attn_implementation": "eager"}, "eager", []),  # of the configuration: auto leaves it
    ],
)
def test_the_kernel_is_said_once(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], kernel: str, said: list[str]
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(recipe, "rank_zero_info", lines.append)
    fields = {name: value for name, value in settings.items() if name != "attn"}
    module = MoELanguageModel(
        {"model_type": "qwen3_moe", **HF["qwen3_moe"], **fields}, attn=settings.get("attn", "auto")
    )
    trainer = L.Trainer(**QUIET, accelerator="cpu", devices=1)
    rows = [{"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}]
    for _ in range(2):
        trainer.predict(module, Steps(rows))
    assert module.model.config._attn_implementation == kernel
    assert lines == said
