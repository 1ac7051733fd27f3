"""What data parallel systems share: each rank trains on its own rows, and the system averages gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lightning_afd.bench.job import Job, Step
from lightning_afd.bench.workload import loss_of

Backward = Callable[[Tensor], object]


class DataParallelStep:
    """Calling it makes one step; `backward` leaves averaged gradients, `advance` applies and drops them."""

    def __init__(self, job: Job, model: nn.Module, backward: Backward, advance: Callable[[], object]) -> None:
        self._job, self._model = job, model
        self._backward, self._advance = backward, advance
        self._number = 0

    def __call__(self) -> float:
        ids_bS = self._job.rows(self._number, self._job.rank, self._job.world)
        self._number += 1
        loss = loss_of(self._model, ids_bS)
        self._backward(loss)
        self._advance()
        return loss.item() * len(ids_bS) / self._job.workload.sequences


def with_own_optimizer(job: Job, model: nn.Module, *, fused: bool = True) -> Step:
    """A model whose backward leaves averaged gradients, under the workload's optimizer."""
    optimizer = job.workload.make_optimizer(list(model.parameters()), fused=fused)

    def advance() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return DataParallelStep(job, model, Tensor.backward, advance)
