"""torch.compile beside the experts gives the same numbers; around them, it is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiling import Compile, by_class, by_forward, graphs, in_place, wrapped
from local_job import LocalJob, plain_step
from tiny import TinyMoE, tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.model.compiled import plain_name
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import Layout
from lightning_afd.recipes import local_job

BESIDE = ("layers.2.attention", "layers.1.mlp.shared", "lm_head")


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def model_of() -> TinyMoE:
    return tiny(layers=3, aux=0.1, shared_expert=True, dense_first=1).double()


@pytest.fixture
def split_and_compile(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How far a step in a job of compiled parts is from the plain loop that is not compiled."""

    def difference(
        model: nn.Module, groups: int, names: tuple[str, ...], compiled: Compile, recompute: str = "none"
    ) -> float:
        make_plan = local_job.make_plan

        def compiling(root: nn.Module, layout: Layout, **choices: Any) -> Any:
            for name in names:  # not before: a copy of a module forgets that it was compiled in place
                compiled(root, name)
            return make_plan(root, layout, recompute=recompute, **choices)

        monkeypatch.setattr(local_job, "make_plan", compiling)
        ids = torch.randint(0, 32, (4, 5), generator=torch.Generator().manual_seed(1))
        batches = [[ids[:2], ids[2:]]]
        loss, gradients = plain_step(model, batches)
        outcome = LocalJob(model, Layout(attention=1, ffn=1, groups=groups)).step(batches)
        outcome.replicas[0] = {plain_name(name): grad for name, grad in outcome.replicas[0].items()}
        return outcome.difference(loss, gradients)

    return difference


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own tracing reads it
@pytest.mark.parametrize(
    ("groups", "compiled", "recompute"), [(1, wrapped, "none"), (2, in_place, "none"), (1, wrapped, "attention")]
)
def test_parts_beside_the_experts(split_and_compile: Any, groups: int, compiled: Compile, recompute: str) -> None:
    assert split_and_compile(model_of(), groups, BESIDE, compiled, recompute) < 1e-12
    assert graphs() >= 1  # parts of one class share theirs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("architecture", "groups", "names"),
    [
        ("qwen3_moe", 1, ("model.layers.1.self_attn",)),
        ("deepseek_v3", 2, ("model.layers.1.self_attn", "model.layers.2.mlp.shared_experts")),
    ],
)
def test_parts_of_transformers(split_and_compile: Any, architecture: str, groups: int, names: tuple[str, ...]) -> None:
    model = tiny_hf(architecture, aux=0.1, num_hidden_layers=3).double()
    assert split_and_compile(model, groups, names, wrapped) < 1e-12
    assert graphs() == len(names)


def a_little_off(root: nn.Module, name: str) -> None:
    """By a backend that makes a mistake."""

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        return lambda *args: tuple(out * (1 + 1e-9) for out in graph(*args))

    root.get_submodule(name).compile(backend=backend)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_a_graph_computes_is_used(split_and_compile: Any) -> None:
    assert split_and_compile(model_of(), 1, ("layers.1.mlp.shared",), a_little_off) > 1e-11


@pytest.mark.parametrize("compiled", [wrapped, in_place, by_forward, by_class])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model", "contains routed experts"),
        ("model.layers.1", "contains routed experts"),
        ("model.layers.1.mlp", "contains routed experts"),
        ("model.layers.1.mlp.experts", "contains routed experts"),
        ("model.layers.1.mlp.router", "is a router"),
    ],
)
def test_what_holds_experts_or_routes_is_refused(compiled: Compile, name: str, why: str) -> None:
    root = nn.ModuleDict({"model": model_of()})
    compiled(root, name)
    with pytest.raises(PlanError, match=f"^{name} is compiled .*{why}.*: compile what lies beside"):
        find_moe_layers(root)


def test_a_list_or_a_root_that_is_compiled_is_refused() -> None:
    for name, called in (("layers", "layers"), ("", "TinyMoE")):
        model = model_of()
        in_place(model, name)
        with pytest.raises(PlanError, match=f"^{called} is compiled"):
            find_moe_layers(model)


@pytest.mark.parametrize("compiled", [wrapped, in_place])
@pytest.mark.parametrize("name", ["layers.1.attention", "layers.1.attention.out", "layers.1.mlp.shared"])
def test_a_part_as_wide_as_there_are_experts_is_no_router(compiled: Compile, name: str) -> None:
    model = tiny(hidden=4, experts=4, expert_width=2, shared_expert=True)
    compiled(model, name)
    assert len(find_moe_layers(model)) == 3
