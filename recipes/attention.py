"""Which attention kernel a transformers model computes with: the switch is that of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_afd.errors import PlanError

if TYPE_CHECKING:
    import torch

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
KERNELS = (*FLASH, "sdpa", "flex_attention", "eager")
OLDEST = {"flash_attention_2": (8, 0), "flash_attention_3": (8, 0), "flash_attention_4": (9, 0)}
"""Compute capability that a flash kernel needs, as their packages say."""
Installed = Callable[[str], bool]
"""Whether a flash kernel's package is there, and its device."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Where and in what attention computes."""

    device: str
    """cpu, cuda ..."""
    dtype: torch.dtype
    capability: tuple[int, int] = (0, 0)
    """Of a CUDA device: (8, 0) is Ampere, (9, 0) Hopper."""


def check_attention(attn: Any) -> None:
    """Raise PlanError unless `attn` is auto, a kernel of transformers, or one of the hub (owner/name)."""
    if attn not in ("auto", *KERNELS) and "/" not in str(attn):
        raise PlanError(f"model.attn={attn} is not a choice; choices: auto, {', '.join(KERNELS)}")


def use_kernel(model: Any, attn: str, compute: Compute) -> str:
    """Set the kernel of a transformers model and return its name; raises PlanError where it cannot be used."""
    kernel = automatic(model, compute) if attn == "auto" else attn
    if kernel in FLASH:
        _check_flash(model, kernel, compute)
    if kernel == "flex_attention" and compute.device == "cpu":
        raise PlanError("model.attn=flex_attention has no gradients on a CPU: choose auto, sdpa or eager")
    try:
        model.set_attn_implementation(kernel)
    except (ValueError, ImportError) as error:
        reason = str(error).split(". ")[0].split(" yet.")[0]
        raise PlanError(f"model.attn={attn}: {' '.join(reason.split())}: choose auto, or another kernel") from error
    return kernel


def automatic(model: Any, compute: Compute, is_installed: Installed | None = None) -> str:
    """The first flash kernel that is installed and fits model, device and dtype, else sdpa, else eager."""
    is_installed = is_installed or _is_installed
    if compute.device == "cuda" and _is_half(compute) and model._supports_flash_attn:
        for kernel in FLASH:
            if kernel in _compatible(model) and compute.capability >= OLDEST[kernel] and is_installed(kernel):
                return kernel
    return "sdpa" if model._supports_sdpa else "eager"


def _compatible(model: Any) -> tuple[str, ...]:
    """Flash kernels that a model works with: attention sinks (GPT-OSS) need special ones."""
    return tuple(getattr(model, "_compatible_flash_implementations", None) or FLASH)


def _is_half(compute: Compute) -> bool:
    return compute.dtype.itemsize == 2


def _is_installed(kernel: str) -> bool:
    from transformers import utils

    return bool(getattr(utils, f"is_flash_attn_{kernel[-1]}_available")())


def _check_flash(model: Any, kernel: str, compute: Compute) -> None:
    """Raise PlanError for what transformers would refuse late, or replace by a kernel that it downloads."""
    others = "choose auto, sdpa or eager"
    if compute.device != "cuda":
        raise PlanError(
            f"model.attn={kernel} needs a CUDA device, and this run computes on the {compute.device}: {others}"
        )
    if compute.capability < OLDEST[kernel]:
        needed, own = (".".join(map(str, pair)) for pair in (OLDEST[kernel], compute.capability))
        raise PlanError(
            f"model.attn={kernel} needs a CUDA device of compute capability {needed}, and this one has {own}: {others}"
        )
    if not _is_half(compute):
        dtype = str(compute.dtype).removeprefix("torch.")
        raise PlanError(
            f"model.attn={kernel} computes in bfloat16 or float16, and this run in {dtype}: choose "
            "trainer.precision=bf16-mixed, or another kernel"
        )
    if kernel not in _compatible(model):
        raise PlanError(
            f"model.attn={kernel} does not fit {type(model).__name__}, which works with {', '.join(_compatible(model))}"
            ": choose one of these, or auto"
        )
    if not _is_installed(kernel):
        raise PlanError(f"model.attn={kernel} needs the package {_PACKAGES[kernel]}: install it, or {others}")


_PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
