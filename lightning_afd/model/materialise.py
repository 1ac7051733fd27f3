"""Give storage and first values to the parameters that were made on the meta device and that this rank owns.

First values depend on a seed and on names only (for experts: on the expert's global id), so they are the same in every
layout. Nothing that other ranks own is ever materialised.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.model.place import is_foreign


def materialise(
    root: nn.Module, expert_ids: Mapping[nn.Module, Sequence[int]], device: torch.device, seed: int
) -> None:
    """Materialise `root` on `device`; `expert_ids` are the global experts that this rank holds of each experts module.

    Raises PlanError for a module that does not say how it starts: transformers' `_init_weights`, or `reset_parameters`.
    """
    tied: dict[int, nn.Parameter] = {}
    for name, module in root.named_modules():
        lazy = [key for key, p in module._parameters.items() if p is not None and _is_lazy(p)]
        buffers = [key for key, b in module._buffers.items() if b is not None and _is_lazy(b)]
        fresh = [key for key in lazy if id(module._parameters[key]) not in tied]
        for key in lazy:
            _give_storage(module, key, tied, device)
        for key in buffers:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)  # type: ignore[arg-type]
        if not fresh and not buffers:
            continue
        initialise = _initialiser(root, name, module)
        if module in expert_ids:
            _initialise_experts(module, expert_ids[module], initialise, f"{seed}/{name}")
        else:
            _seeded(f"{seed}/{name}", lambda initialise=initialise, module=module: initialise(module))  # type: ignore[misc]


def has_lazy(root: nn.Module) -> bool:
    """Whether anything of `root` that this rank owns is still on the meta device."""
    return any(_is_lazy(tensor) for tensor in (*root.parameters(), *root.buffers()))


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" and not is_foreign(tensor)


def _give_storage(module: nn.Module, key: str, tied: dict[int, nn.Parameter], device: torch.device) -> None:
    old = module._parameters[key]
    assert old is not None
    if id(old) not in tied:
        new = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
        vars(new).update({k: v for k, v in vars(old).items() if k != "_is_hf_initialized"})
        tied[id(old)] = new
    module._parameters[key] = tied[id(old)]


def _initialise_experts(
    module: nn.Module, experts: Iterable[int], initialise: Callable[[nn.Module], object], name: str
) -> None:
    """One expert at a time, each by its own seed, through a copy of the module that holds one expert."""
    for slot, expert in enumerate(experts):
        one = copy.copy(module)
        one._parameters = {
            key: None if p is None else nn.Parameter(torch.empty_like(p[:1])) for key, p in module._parameters.items()
        }
        _seeded(f"{name}/{expert}", lambda one=one: initialise(one))  # type: ignore[misc]
        with torch.no_grad():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parameter[slot].copy_(one._parameters[key][0])  # type: ignore[index]


def _seeded(name: str, function: Callable[[], object]) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
        function()


def _initialiser(root: nn.Module, name: str, module: nn.Module) -> Callable[[nn.Module], object]:
    """How a module starts: by the nearest transformers model around it, or by its own reset_parameters."""
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        around = root.get_submodule(".".join(parts[:depth]))
        if hasattr(around, "_init_weights") and hasattr(around, "config"):
            return around._init_weights  # type: ignore[no-any-return]
    if hasattr(module, "reset_parameters"):
        return lambda one: one.reset_parameters()  # type: ignore[operator]
    raise PlanError(
        f"{name or type(module).__name__} was made on the meta device and does not say how it starts: give it a method "
        "reset_parameters, or make it in __init__ instead of configure_model"
    )
