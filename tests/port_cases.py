"""One A rank and one F rank in this process, for tests of what user code may do in a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from local_job import LocalJob, make_batches, micro_batch_loss, step_of
from tiny import TinyLayer, TinyMoE, tiny
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout

ONE = Layout(attention=1, ffn=1)
IDS = make_batches(1, 1)[0][0]


def model_of(kind: type[TinyLayer] = TinyLayer, **sizes: Any) -> TinyMoE:
    """A small float64 model whose layers are of class `kind`."""
    model = tiny(**{"layers": 2, "hidden": 8, "expert_width": 4, **sizes}).double()
    for layer in model.layers:
        layer.__class__ = kind
    return model


def run(model: TinyMoE, function: Callable[[TinyMoE], Any] = lambda model: micro_batch_loss(model, IDS)) -> Any:
    """One training step with one micro-batch; `function` gets the A rank's model."""
    job = LocalJob(model, ONE)
    return job.run([[step_of(partial(function, job.models[0]))]])[0][0]


def refusal(function: Callable[[], Any]) -> str:
    """The text of the PlanError that `function` raises."""
    with pytest.raises(PlanError) as failure:
        function()
    return str(failure.value)


class CheckpointedLayer(TinyLayer):
    """Checkpoints inside its forward, as transformers does."""

    reentrant = False

    def forward(self, h_BSH: Tensor) -> Tensor:
        return checkpoint(super().forward, h_BSH, use_reentrant=self.reentrant)
