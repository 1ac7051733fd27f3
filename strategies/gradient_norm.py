"""The norm of all gradients of all ranks: measured once per optimizer step, clipped by, and refused if not finite."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_afd.engine import Engine
from lightning_afd.model.place import is_first_copy, owned_parameters
from lightning_afd.optimizer import clip_by_norm, measure_norm
from lightning_afd.strategies.scaler import active_scaler

if TYPE_CHECKING:
    import lightning.pytorch as pl

_PATCHED = ("clip_grad_by_norm", "clip_grad_by_value", "_after_closure")


class GradientNorm:
    """Takes the place of a precision plugin's clipping, until `detach`.

    The norm is measured where gradients are clipped by it, before they are clipped by value (which would hide an
    infinite one), else behind the user's hooks. Under a loss scaler, which decides by itself, only to clip by it.
    """

    def __init__(self, engine: Engine, module: pl.LightningModule, precision: Any, *, skip: bool) -> None:
        self.value: float | None = None
        """The norm in the last optimizer step, before clipping."""
        self.skipped = False
        """Whether nobody makes the last optimizer step, as the norm is not finite."""
        self._engine = engine
        self._module = module
        self._precision = precision
        self._skip = skip
        self._owned = list(owned_parameters(module))
        self._parameters = [parameter for _, parameter in self._owned]
        self._measured = False
        precision.clip_grad_by_norm = self._clip_by_norm
        precision.clip_grad_by_value = partial(self._clip_by_value, precision.clip_grad_by_value)
        precision._after_closure = partial(self._after_closure, precision._after_closure)

    def detach(self) -> None:
        """Give the plugin its own methods back."""
        for name in _PATCHED:
            self._precision.__dict__.pop(name, None)

    def _after_closure(self, original: Any, *args: Any) -> None:
        """Lightning's hooks and clipping between a backward and the optimizer's step."""
        self._measured = self.skipped = False
        original(*args)
        self._check_once()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """The one norm of all ranks: what several hold once, experts of all F ranks."""
        clip_by_norm(self._parameters, self._measure(), float(clip_val))

    def _clip_by_value(self, original: Any, optimizer: Optimizer, clip_val: float) -> None:
        self._check_once()
        if any(parameter.grad is not None for parameter in self._parameters):  # torch refuses to clip nothing
            original(optimizer, clip_val)

    def _check_once(self) -> None:
        if not self._measured and active_scaler(self._precision) is None:
            self._measure()

    def _measure(self) -> float:
        engine = self._engine
        counts = partial(is_first_copy, layout=engine.plan.layout, rank=engine.rank)
        norm = measure_norm(self._parameters, engine.collectives, counts=counts)
        self.value, self._measured = norm.value, True
        if norm.culprit is not None and active_scaler(self._precision) is None:
            self._refuse(*norm.culprit)
        return norm.value

    def _refuse(self, rank: int, number: int) -> None:
        if self._skip:
            self.skipped = True
            for parameter in self._parameters:
                parameter.grad = None
            return
        engine = self._engine
        name = engine.collectives.broadcast_object(self._owned[number][0] if rank == engine.rank else None, rank)
        raise FloatingPointError(
            f"the gradient of {name} on {engine.plan.layout.name_of(rank)} is not finite in step "
            f"{self._module.global_step}: lower the learning rate or check the data, "
            "or skip such steps with AFDStrategy(on_nonfinite='skip')"
        )
