"""Let modules be made without storage: on the meta device, until it is known what this rank owns.

Nothing that would get lost there is lost in silence: `from_pretrained` of transformers loads real weights, and what
writes into a parameter without storage is refused, unless it is the first value that materialise.py makes again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_afd.errors import PlanError
from lightning_afd.model.materialise import has_init_hook


@contextmanager
def without_storage() -> Iterator[None]:
    """Context in which modules are made on the meta device; raises PlanError for values that would be lost."""
    watch = _Watch()
    with torch.device("meta"), watch, _real_from_pretrained(watch):
        try:
            yield
        except RuntimeError:
            if watch.refusal is None:
                raise
            raise watch.refusal from None  # load_state_dict had made an error of its own from it


class _Watch(TorchFunctionMode):
    """Refuses to write into parameters without storage from anywhere but the module's own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.refusal: PlanError | None = None
        self._parameters: dict[int, nn.Parameter] = {}
        """Parameters without storage that were used, by what they share with their views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if self.on and isinstance(target, Tensor) and target.is_meta:
            self._check(func, target, args[1:])
        return func(*args, **kwargs)

    def _check(self, func: Any, target: Tensor, others: Sequence[Any]) -> None:
        key = target.untyped_storage()._cdata
        if isinstance(target, nn.Parameter):
            self._parameters[key] = target
        parameter = self._parameters.get(key)
        if parameter is None or not _writes(func):
            return
        loses = any(isinstance(other, Tensor) and not other.is_meta for other in others)
        if loses or not _is_initialisation(parameter, sys._getframe(2)):
            self.refusal = PlanError(
                f"a parameter of shape {list(parameter.shape)} has no storage yet, so that what is written into it is "
                "lost: configure_model makes modules on the meta device; load weights with from_pretrained or "
                "load_state_dict(..., assign=True), put first values into a method reset_parameters or "
                "_init_weights(module), or make the model in __init__"
            )
            raise self.refusal


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def _is_initialisation(parameter: nn.Parameter, frame: FrameType | None) -> bool:
    """Whether the innermost method of a module on the stack is its owner's, or the hook that materialise.py calls."""
    while frame is not None:
        module, name = frame.f_locals.get("self"), frame.f_code.co_name
        if isinstance(module, nn.Module) and name != "apply":
            own = any(p is parameter for p in module._parameters.values())
            return own or (name == "_init_weights" and has_init_hook(module))
        frame = frame.f_back
    return False


@contextmanager
def _real_from_pretrained(watch: _Watch) -> Iterator[None]:
    """Weights that are loaded are real: transformers refuses to load them under the meta device."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.__dict__["from_pretrained"]

    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        watch.on, before = False, watch.on
        try:
            with torch.device("cpu"):
                return original.__get__(None, cls)(*args, **kwargs)
        finally:
            watch.on = before

    PreTrainedModel.from_pretrained = classmethod(load)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original
