"""The tail of the step (norm, head, loss) on F ranks: loss and gradients equal the plain loop, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from local_job import Batches, LocalJob, make_batches, plain_step
from tiny import TinyMoE, tiny
from torch import nn

from lightning_afd.placement import Layout
from lightning_afd.schedule.orders import ORDERS

TOLERANCE = 1e-12
SMALL: dict[str, Any] = {"layers": 3, "hidden": 8, "expert_width": 4}
EVERYTHING: dict[str, Any] = {"aux": 0.05, "shared_expert": True, "dense_first": 1, "layers": 4}
LAYOUTS = [(1, 1, 1), (2, 2, 1), (1, 3, 1), (3, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 3)]


def model_of(**sizes: Any) -> TinyMoE:
    """A small float64 model."""
    return tiny(**{**SMALL, **sizes}).double()


def layout_of(attention: int, ffn: int, groups: int = 1) -> Layout:
    return Layout(attention=attention, ffn=ffn, groups=groups, head="ffn")


def difference(model: nn.Module, layout: Layout, order: str, batches: Batches) -> float:
    """How far one step is from the plain loop."""
    return LocalJob(model, layout, order).step(batches).difference(*plain_step(model, batches))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("attention", "ffn", "groups"), LAYOUTS)
def test_step_equals_the_plain_loop(attention: int, ffn: int, groups: int, micro_batches: int, order: str) -> None:
    batches = make_batches(attention, micro_batches)
    assert difference(model_of(), layout_of(attention, ffn, groups), order, batches) < TOLERANCE


@pytest.mark.parametrize(("attention", "ffn", "groups"), LAYOUTS)
def test_auxiliary_loss_and_everything_else(attention: int, ffn: int, groups: int) -> None:
    batches = make_batches(attention, 3)
    assert difference(model_of(**EVERYTHING), layout_of(attention, ffn, groups), "af-pipe", batches) < TOLERANCE
