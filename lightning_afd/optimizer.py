"""What the optimizer sees on a rank that owns a part of the model, and the one norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_afd.device import HostValues
from lightning_afd.model.place import is_owned
from lightning_afd.transport.base import Collectives


def drop_foreign(optimizer: Optimizer) -> None:
    """Take parameters of other ranks (on meta) out of the groups; empty groups stay, so that schedulers agree."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if is_owned(parameter)]
    drop_state_of_others(optimizer)


def drop_state_of_others(optimizer: Optimizer) -> None:
    """Keep state of parameters in the groups only; some optimizers make that of all in their constructor."""
    kept = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in kept]:
        del optimizer.state[key]


@dataclass(frozen=True)
class GlobalNorm:
    """2-norm of the gradients of all ranks."""

    value: float
    culprit: tuple[int, int] | None
    """(rank, number of the parameter on that rank) of the first gradient that is not finite."""


def measure_norm(
    parameters: Sequence[nn.Parameter], collectives: Collectives, *, counts: Callable[[nn.Parameter], bool]
) -> GlobalNorm:
    """The norm over all ranks; `counts` is False for parameters of which an earlier rank holds a copy.

    One exchange of two numbers per rank, and before it one copy of both from the device, the only wait for it.
    """
    numbers = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
    counted = [counts(parameters[number]) for number in numbers]
    total, place = HostValues(_total_and_first_bad(_squares(parameters), counted)).wait() if numbers else (0.0, -1.0)
    everyone = collectives.all_gather([total, numbers[int(place)] if place >= 0 else -1.0])
    culprit = next(((rank, int(number)) for rank, (_, number) in enumerate(everyone) if number >= 0), None)
    return GlobalNorm(math.sqrt(sum(square for square, _ in everyone)), culprit)


def clip_by_norm(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients by max_norm / (norm + 1e-6) where that is below 1, as torch.nn.utils.clip_grad_norm_ does."""
    factor = min(1.0, max_norm / (norm + 1e-6))
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads and factor < 1.0:
        torch._foreach_mul_(grads, factor)


def _squares(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Sum of squares (float64) of each gradient that there is.

    Norms are float32 at least: one of half precision would overflow at 65504.
    """
    grads = [_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    double = any(grad.dtype == torch.float64 for grad in grads)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float64 if double else torch.float32)
    return [norm.to(torch.float64).square() for norm in norms]


def _total_and_first_bad(squares: Sequence[Tensor], counted: Sequence[bool]) -> Tensor:
    """The sum of those that count, and the place of the first one of all that is not finite, or -1; on the device."""
    adding = [square for square, counts in zip(squares, counted, strict=True) if counts]
    total = torch.stack(adding).sum() if adding else torch.zeros_like(squares[0])
    bad = ~torch.stack(list(squares)).isfinite()
    return torch.stack([total, (bad.int().argmax() + 1) * bad.any() - 1.0])


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
