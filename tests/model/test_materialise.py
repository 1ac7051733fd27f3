"""Models made on the meta device: first values depend on seed and names, not on the layout; replicas start equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiling import wrapped
from tiny import hf_config, tiny
from torch import Tensor, nn

from lightning_afd.engine import Engine
from lightning_afd.errors import PlanError
from lightning_afd.model.compiled import plain_name
from lightning_afd.model.experts_module import shard_experts
from lightning_afd.model.materialise import materialise
from lightning_afd.model.place import is_owned
from lightning_afd.owned import Owned
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.transport.local import LocalNetwork, LocalTransport

ONE = Layout(attention=1, ffn=1)


def on_meta(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(name), experts_implementation="eager")


def start(models: list[nn.Module], layout: Layout, **choices: Any) -> list[dict[str, Tensor]]:
    """What each rank holds after placing and materialising its copy."""
    network = LocalNetwork(layout)

    def run(rank: int) -> dict[str, Tensor]:
        model = models[rank]
        transport = LocalTransport(network, rank)
        plan, layers = make_plan(model, layout, order="af-pipe", micro_batches=2, **choices)
        engine = Engine(plan, rank, transport, transport)
        engine.place(model, layers)
        engine.materialise(model, layers, torch.device("cpu"))
        return {name: p.detach() for name, p in model.named_parameters() if is_owned(p)}

    return network.run([lambda rank=rank: run(rank) for rank in range(layout.world)])  # type: ignore[misc]


def test_replicas_are_made_equal_on_the_device_of_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer's model is on the host while a strategy is set up, and NCCL copies nothing from there."""
    model, asked = tiny(), []

    class Collectives:
        def copy_from_first_replica(self, tensor: Tensor) -> None:
            asked.append(tensor.device.type)

    plan, layers = make_plan(model, Layout(attention=2, ffn=1), order="af-pipe", micro_batches=1)
    owned = Owned(plan, 0, Collectives())  # type: ignore[arg-type]
    owned.place(model, layers)
    monkeypatch.setattr(Tensor, "copy_", lambda self, other: self)  # nothing comes back from this device
    owned.materialise(model, layers, torch.device("meta"), 0)
    assert set(asked) == {"meta"}


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    for name in {name for part in parts for name in part}:
        held = [part[name] for part in parts if name in part]
        joined[name] = torch.cat(held) if ".experts." in name else held[0]
    return joined


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_first_values_do_not_depend_on_the_layout(name: str) -> None:
    model = on_meta(name)
    torch.manual_seed(3)
    want = whole(start([copy.deepcopy(model) for _ in range(2)], ONE))
    assert set(want) == {key for key, _ in model.named_parameters()}
    assert all(not value.is_meta and value.isfinite().all() for value in want.values())
    assert all(value.std() > 0 for key, value in want.items() if key.endswith("experts.down_proj"))
    for layout in (Layout(attention=1, ffn=3), Layout(attention=2, ffn=2), Layout(attention=1, ffn=2, groups=2)):
        got = whole(start([copy.deepcopy(model) for _ in range(layout.world)], layout))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
    torch.manual_seed(4)
    other = whole(start([copy.deepcopy(model) for _ in range(2)], ONE))
    assert not torch.equal(other["model.embed_tokens.weight"], want["model.embed_tokens.weight"])


def test_shared_experts_start_equal_on_all_ffn_ranks_whatever_the_script_does() -> None:
    layout, model = Layout(attention=1, ffn=2), on_meta("deepseek_v3")
    torch.manual_seed(3)
    want = whole(start([copy.deepcopy(model) for _ in range(2)], ONE))
    for models in (
        [copy.deepcopy(model) for _ in range(3)],
        [tiny(seed=rank, shared_expert=True) for rank in range(3)],
    ):
        torch.manual_seed(3)
        parts = start(models, layout, shared_experts="ffn")
        shared = [name for name in parts[1] if ".shared" in name]
        assert shared and not any(name in parts[0] for name in shared)
        assert all(torch.equal(parts[1][name], parts[2][name]) for name in shared)
        assert all(name not in want or torch.equal(parts[1][name], want[name]) for name in shared)


def test_replicas_of_a_script_without_a_seed_start_equal() -> None:
    models = [tiny(seed=rank) for rank in range(3)]
    first = {name: p.clone() for name, p in models[0].named_parameters()}
    parts = start(models, Layout(attention=2, ffn=1))
    assert all(
        torch.equal(parts[1][name], value) and torch.equal(value, first[name]) for name, value in parts[0].items()
    )


def test_a_compiled_module_starts_as_it_would_without() -> None:
    model = on_meta("qwen3_moe")
    want = whole(start([copy.deepcopy(model) for _ in range(2)], ONE))
    wrapped(model, "lm_head")
    wrapped(model, "model.layers.1.self_attn")
    got = whole(start([copy.deepcopy(model) for _ in range(2)], ONE))
    assert got.keys() != want.keys() == {plain_name(name) for name in got}
    assert all(torch.equal(value, want[plain_name(name)]) for name, value in got.items())


def test_weights_made_in_init_are_kept() -> None:
    model = tiny(seed=5)
    want = {name: p.clone() for name, p in model.named_parameters()}
    got = whole(start([copy.deepcopy(model) for _ in range(3)], Layout(attention=1, ffn=2)))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_module_that_does_not_say_how_it_starts_is_refused() -> None:
    with torch.device("meta"):
        model = tiny()
    with pytest.raises(PlanError, match="reset_parameters"):
        start([copy.deepcopy(model) for _ in range(2)], ONE)


class ParentsKnow(nn.Module):
    """Its hook sets what blocks hold, experts included, as some models of transformers do."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.block, self.forgets = tiny(layers=1).layers[0].mlp, forgets

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.block:
            for parameter in module.parameters():
                if not getattr(parameter, "_is_hf_initialized", False) and not self.forgets:
                    nn.init.normal_(parameter)


def test_parents_set_what_their_children_hold() -> None:
    with torch.device("meta"):
        model, bad = ParentsKnow(), ParentsKnow(forgets=True)
    parts = []
    for experts in (range(4), range(2, 4)):
        own = copy.deepcopy(model)
        shard_experts(own.block.experts, experts)
        materialise(own, {own.block.experts: experts}, torch.device("cpu"), 1)
        parts.append(own.block)
    assert torch.equal(parts[0].experts.down_proj[2:], parts[1].experts.down_proj)
    assert torch.equal(parts[0].router.weight, parts[1].router.weight)
    assert all(parameter.isfinite().all() and parameter.std() > 0 for parameter in parts[0].parameters())
    with pytest.raises(PlanError, match=r"block\.router\.weight.*does not say how it starts"):
        materialise(bad, {}, torch.device("cpu"), 1)
