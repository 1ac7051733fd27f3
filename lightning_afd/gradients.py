"""Gradients of a pipelined step: kept apart until Lightning's backward asks for them, summed over data replicas.

Lightning calls training_step, then zero_grad, then backward. The pipeline makes its gradients inside training_step, so
they are set aside there and installed by the backward of the returned loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.transport.base import Collectives

BUCKET_BYTES = 25 * 2**20
Around = Callable[[int], AbstractContextManager[object]]
"""Gives the context in which a chunk of so many bytes is summed."""


class GradientStash:
    """The gradients of one batch, outside of `parameter.grad`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._kept: list[Tensor | None] = []
        self._made: list[Tensor | None] = []

    def begin(self) -> None:
        """Put what `grad` holds aside (it belongs to earlier batches of the window, or to the last step)."""
        self._kept = [parameter.grad for parameter in self._parameters]
        self._made = []
        for parameter in self._parameters:
            parameter.grad = None

    def end(self) -> None:
        """Take the new gradients and put the earlier ones back."""
        self._made = [parameter.grad for parameter in self._parameters]
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            parameter.grad = kept
        self._kept = []

    def install(self, scale: Tensor) -> None:
        """Add the gradients, multiplied by `scale` (scalar), to `grad`; moves them where `grad` is None."""
        if len(self._made) != len(self._parameters):
            raise PlanError("backward ran twice for one training_step, but its gradients were made once: call it once")
        made = [(p, grad) for p, grad in zip(self._parameters, self._made, strict=True) if grad is not None]
        self._made = []
        multiply([grad for _, grad in made], scale)
        for parameter, grad in made:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def multiply(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a scalar, most often 1."""
    if grads and not (factor.device.type == "cpu" and factor.item() == 1.0):
        torch._foreach_mul_(list(grads), factor)


class _Installer(torch.autograd.Function):
    """A loss whose backward calls `install(scale)` with the gradient that Lightning seeds it with."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, install: Callable[[Tensor], None]) -> Tensor:
        ctx.install = install
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.install(grads[0])
        return None, None, None


def installing_loss(loss: Tensor, install: Callable[[Tensor], None]) -> Tensor:
    """`loss` (scalar, no graph) as a tensor whose backward runs `install` once."""
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return _Installer.apply(anchor, loss, install)  # type: ignore[no-any-return, no-untyped-call]


def sum_over_replicas(
    parameters: Iterable[nn.Parameter], collectives: Collectives, around: Around = lambda nbytes: nullcontext()
) -> None:
    """Add the gradients of all data replicas, in buckets, identically on every rank of the group.

    A parameter without gradient on all replicas keeps None, as in a single process; one that has a gradient on some
    counts as zero on the others. Cost per step: one message per 25 MiB of dense gradients, and before them a small
    one, which waits for the last replica; each inside of `around`.
    """
    owned = [parameter for parameter in parameters if parameter.requires_grad]
    if not owned:
        return
    present = torch.tensor([float(p.grad is not None) for p in owned], device=owned[0].device)
    with around(present.nbytes):
        collectives.sum_over_replicas(present)
    used = [parameter for parameter, count in zip(owned, present.tolist(), strict=True) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    add_over_replicas([parameter.grad for parameter in used if parameter.grad is not None], collectives, around)


def add_over_replicas(
    grads: Sequence[Tensor], collectives: Collectives, around: Around = lambda nbytes: nullcontext()
) -> None:
    """Add gradients that all data replicas have, in place and in buckets, each inside of `around`."""
    for bucket in buckets(grads):
        with around(sum(grad.nbytes for grad in bucket)):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            collectives.sum_over_replicas(flat)
            for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(part.view_as(grad))


def buckets(tensors: Sequence[Tensor], limit: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, at most `limit` bytes together (a larger one stands alone)."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and (size + nbytes > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket
