"""Give storage and first values to the parameters that were made on the meta device and that this rank owns.

First values depend on a seed and on names only (for experts: on the expert's global id), so they are the same in every
layout. Nothing that other ranks own is ever materialised.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.model.compiled import plain_name
from lightning_afd.model.place import is_foreign

_MARK = "_is_hf_initialized"
"""By this attribute transformers knows tensors that its `_init_weights` must leave alone."""


def materialise(
    root: nn.Module, expert_ids: Mapping[nn.Module, Sequence[int]], device: torch.device, seed: int
) -> None:
    """Materialise `root` on `device`; `expert_ids` are the global experts that this rank holds of each experts module.

    Modules are initialised as transformers does it, children first: a parent may set what its children hold. Raises
    PlanError for what neither `_init_weights(module)` of a model around it nor `reset_parameters` gives a first value.
    """
    fresh = _give_storage(root, device)
    if not fresh:
        return
    with _marked(_tensors(root), fresh):
        for name, module in reversed(list(root.named_modules())):
            if any(tensor in fresh for tensor in _tensors(module)):
                _initialise(_Start(root, name, module, f"{seed}/{plain_name(name)}"), fresh, expert_ids)
    blank = [name for name, tensor in _named_tensors(root) if tensor in fresh and _is_blank(tensor)]
    if blank:
        raise PlanError(_no_first_value(", ".join(blank)))


def has_lazy(root: nn.Module) -> bool:
    """Whether anything of `root` that this rank owns is still on the meta device."""
    return any(_is_lazy(tensor) for tensor in _tensors(root))


def has_init_hook(module: nn.Module) -> bool:
    """Whether a model says how the modules inside it start: `_init_weights(module)`, as in transformers."""
    hook = getattr(module, "_init_weights", None)
    return callable(hook) and len(inspect.signature(hook).parameters) == 1


# -- storage ----------------------------------------------------------------------------------------------------------


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_meta and not is_foreign(tensor)


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from root.named_parameters()
    yield from root.named_buffers()


def _tensors(root: nn.Module) -> Iterator[Tensor]:
    return (tensor for _, tensor in _named_tensors(root))


def _give_storage(root: nn.Module, device: torch.device) -> set[Tensor]:
    """Replace what is lazy by blank tensors, tied ones by one; returns these."""
    made: dict[Tensor, Tensor] = {}
    for name, module in root.named_modules():
        _refuse_attributes(name, module)
        for slots in (module._parameters, module._buffers):
            for key, old in slots.items():
                if old is not None and _is_lazy(old):
                    if old not in made:
                        made[old] = _with_storage(old, device)
                    slots[key] = made[old]  # type: ignore[assignment]
    return set(made.values())


def _with_storage(old: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(old, device=device, requires_grad=False)
    new = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    vars(new).update({key: value for key, value in vars(old).items() if key != _MARK})
    return _blanked(new)


@torch.no_grad()
def _blanked(tensor: Tensor) -> Tensor:
    """Filled with what no initialisation leaves behind, so that it can be seen what it left out."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


@torch.no_grad()
def _is_blank(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.sum().isnan())  # needs no memory, unlike isnan().any()
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _refuse_attributes(name: str, module: nn.Module) -> None:
    """Plain tensors (a metric's state, a constant) are no parameters: their values were lost on the meta device."""
    lost = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
    if lost:
        raise PlanError(
            f"{', '.join(lost)} of {name or type(module).__name__} was made on the meta device and is no parameter, so "
            "that its value is lost: make it in __init__ instead of configure_model, or under `torch.device('cpu')`"
        )


# -- first values -----------------------------------------------------------------------------------------------------


class _Start:
    """One module whose parameters, or whose children's, get their first values."""

    def __init__(self, root: nn.Module, name: str, module: nn.Module, seed: str) -> None:
        self.name, self.module, self.seed = name, module, seed
        self._around = [root.get_submodule(part) for part in _prefixes(name)]

    def model(self) -> nn.Module | None:
        """The nearest model around it, or itself, that has a hook for all modules inside."""
        return next((module for module in self._around if has_init_hook(module)), None)

    def parents(self) -> list[nn.Module]:
        """The modules around it up to that model, the nearest first."""
        model = self.model()
        return [] if model is None else self._around[1 : self._around.index(model)]

    def by_itself(self) -> Callable[[nn.Module], object] | None:
        """How it starts: by the hook, else by its own reset_parameters."""
        model = self.model()
        if model is not None:
            return model._init_weights  # type: ignore[return-value]
        return (lambda one: one.reset_parameters()) if hasattr(self.module, "reset_parameters") else None  # type: ignore[operator]


def _prefixes(name: str) -> list[str]:
    """A module's name and those of the modules around it, to the root: "a.b" gives "a.b", "a", ""."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _initialise(start: _Start, fresh: set[Tensor], expert_ids: Mapping[nn.Module, Sequence[int]]) -> None:
    module, initialise = start.module, start.by_itself()
    own = {key: t for key, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    blank = [tensor for tensor in own.values() if tensor in fresh]
    if initialise is None:
        if blank:
            raise PlanError(_no_first_value(start.name or type(module).__name__))
        return
    if module in expert_ids:
        _initialise_experts(start, expert_ids[module], initialise)
        for tensor in blank:
            setattr(tensor, _MARK, True)  # parents would draw for all of them at once
    elif blank or start.model() is not None:
        with _keeping(tensor for tensor in own.values() if tensor not in fresh and not tensor.is_meta):
            _seeded(start.seed, lambda: initialise(module))


def _initialise_experts(start: _Start, experts: Iterable[int], initialise: Callable[[nn.Module], object]) -> None:
    for slot, expert in enumerate(experts):
        _initialise_expert(start, slot, f"{start.seed}/{expert}", initialise)


@torch.no_grad()
def _initialise_expert(start: _Start, slot: int, seed: str, initialise: Callable[[nn.Module], object]) -> None:
    """One expert by its own seed, while the module holds that expert only."""
    module = start.module
    whole = {key: p for key, p in module._parameters.items() if p is not None}
    one = {key: nn.Parameter(_blanked(torch.empty_like(p[:1])), requires_grad=False) for key, p in whole.items()}
    module._parameters.update(one)
    try:
        _seeded(seed, lambda: _until_filled(start, initialise, one.values()))
    finally:
        module._parameters.update(whole)
    for key, parameter in whole.items():
        if not getattr(parameter, _MARK, False):
            parameter[slot].copy_(one[key][0])


def _until_filled(start: _Start, initialise: Callable[[nn.Module], object], tensors: Iterable[Tensor | None]) -> None:
    """By the module itself, or by the parents that set what it holds."""
    wanted = set(tensors)
    initialise(start.module)
    for parent in start.parents():
        if any(_is_blank(tensor) for tensor in wanted):
            with _marked(_tensors(parent), wanted):
                initialise(parent)


def _seeded(name: str, function: Callable[[], object]) -> None:
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # not those of other ranks
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
        function()


@contextmanager
def _marked(tensors: Iterable[Tensor], fresh: set[Tensor]) -> Iterator[None]:
    """Let `_init_weights` leave alone what is not fresh; in the end all tensors have the marks that they had before."""
    before = [(tensor, getattr(tensor, _MARK, None)) for tensor in tensors]
    for tensor, _ in before:
        if tensor not in fresh:
            setattr(tensor, _MARK, True)
    try:
        yield
    finally:
        for tensor, mark in before:
            vars(tensor).pop(_MARK, None)
            if mark is not None:
                setattr(tensor, _MARK, mark)


@contextmanager
def _keeping(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back values that are not fresh (loaded weights) after the module has initialised all that it has."""
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)


def _no_first_value(name: str) -> str:
    return (
        f"{name} was made on the meta device and does not say how it starts: give the module a method "
        "reset_parameters, give the model a method _init_weights(module) that sets it, or make it in __init__ instead "
        "of configure_model"
    )
