"""What user code may enter for the whole thread: it would leak from a suspended coroutine into the others."""

from __future__ import annotations

import torch


def context_state() -> tuple[object, ...]:
    """Everything thread-wide that user code may have entered: compared at each switch."""
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    functions = torch.overrides._get_current_function_mode_stack()
    dispatches = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    grad = ("grad", torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) or ()  # checkpointing, save_on_cpu
    modes = (("function modes", *map(id, functions)), ("dispatch modes", *map(id, dispatches)))
    return (grad, *autocast, *modes, ("saved tensor hooks", *map(id, hooks)), _sdpa_kernels(), _stream())


def _sdpa_kernels() -> tuple[object, ...]:
    """What torch.nn.attention.sdpa_kernel sets."""
    names = ("math", "flash", "mem_efficient", "cudnn")
    return ("sdpa", *(name for name in names if getattr(torch._C, f"_get_{name}_sdp_enabled")()))


def _stream() -> tuple[object, ...]:
    """The thread's device and stream: a step that changed them would launch other micro-batches' work elsewhere."""
    if not torch.cuda.is_initialized():
        return ("stream",)
    return ("stream", torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)


def difference(before: tuple[object, ...], after: tuple[object, ...]) -> str:
    """What changed between two states, in words."""
    return "; ".join(f"{old} became {new}" for old, new in zip(before, after, strict=True) if old != new)
