"""torch.compile beside the experts gives the same numbers; around them, it is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from local_job import LocalJob, plain_step
from tiny import TinyMoE, tiny
from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import Layout
from lightning_afd.recipes import local_job

Compile = Callable[[nn.Module, str], None]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def wrapped(root: nn.Module, name: str) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, torch.compile(root.get_submodule(name), backend="eager"))


def in_place(root: nn.Module, name: str) -> None:
    root.get_submodule(name).compile(backend="eager")


def by_forward(root: nn.Module, name: str) -> None:
    module = root.get_submodule(name)
    module.forward = torch.compile(module.forward, backend="eager")


def model_of() -> TinyMoE:
    return tiny(layers=3, aux=0.1, shared_expert=True, dense_first=1).double()


def graphs() -> int:
    """Graphs that were really compiled since the last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


BESIDE = ("layers.2.attention", "layers.1.mlp.shared", "lm_head")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own tracing reads it
@pytest.mark.parametrize(
    ("groups", "compiled", "recompute"), [(1, wrapped, "none"), (2, in_place, "none"), (1, wrapped, "attention")]
)
def test_parts_beside_the_experts(
    monkeypatch: pytest.MonkeyPatch, groups: int, compiled: Compile, recompute: str
) -> None:
    make_plan = local_job.make_plan

    def compiling(root: nn.Module, layout: Layout, **choices: Any) -> Any:
        for name in BESIDE:  # not before: a copy of a module forgets that it was compiled in place
            compiled(root, name)
        return make_plan(root, layout, recompute=recompute, **choices)

    monkeypatch.setattr(local_job, "make_plan", compiling)
    ids = torch.randint(0, 32, (4, 5), generator=torch.Generator().manual_seed(1))
    batches, model = [[ids[:2], ids[2:]]], model_of()
    loss, gradients = plain_step(model, batches)
    torch._dynamo.utils.counters.clear()
    job = LocalJob(model, Layout(attention=1, ffn=1, groups=groups))
    outcome = job.step(batches)
    outcome.replicas[0] = {name.replace("_orig_mod.", ""): grad for name, grad in outcome.replicas[0].items()}
    assert outcome.difference(loss, gradients) < 1e-12
    assert graphs() >= 1  # parts of one class share theirs


@pytest.mark.parametrize("compiled", [wrapped, in_place, by_forward])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("layers", "contains routed experts"),
        ("layers.1", "contains routed experts"),
        ("layers.1.mlp", "contains routed experts"),
        ("layers.1.mlp.experts", "contains routed experts"),
        ("layers.1.mlp.router", "is a router"),
    ],
)
def test_what_holds_experts_or_routes_is_refused(compiled: Compile, name: str, why: str) -> None:
    model = model_of()
    compiled(model, name)
    with pytest.raises(PlanError, match=f"^{name} is compiled .*{why}.*: compile what lies beside"):
        find_moe_layers(model)
