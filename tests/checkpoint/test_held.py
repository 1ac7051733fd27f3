"""Who brings which tensor to a checkpoint, and who takes it, on all ranks of a layout in this process."""

import re
from typing import Any

import pytest
import torch
from tiny import tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd.checkpoint.held import needed_names, offered_state, restore_state, rows_by_name, tied_names
from lightning_afd.errors import CheckpointError
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import LocalJob

LAYOUTS = [
    Layout(attention=1, ffn=1),
    Layout(attention=2, ffn=3),
    Layout(attention=1, ffn=2, groups=2),
    Layout(attention=2, ffn=1, groups=3),
]
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def job(layout: Layout, seed: int = 0) -> LocalJob:
    """A DeepSeek-V3 with one dense layer first, 3 MoE layers of 4 experts, and a bias buffer beside each router."""
    return LocalJob(tiny_hf("deepseek_v3", seed=seed), layout)


def offers(work: LocalJob) -> list[dict[str, Tensor]]:
    """What each rank brings."""
    layout = work.layout
    firsts = [layout.worker_of(r).role == "A" and layout.index_of(r) == 0 for r in range(layout.world)]
    return [offered_state(model, first_replica=first) for model, first in zip(work.models, firsts, strict=True)]


def joined(work: LocalJob) -> dict[str, Tensor]:
    """The whole state from what the ranks bring; fails where two bring different tensors or nobody brings one."""
    state: dict[str, Tensor] = {}
    for model, brought in zip(work.models, offers(work), strict=True):
        rows = rows_by_name(model)
        for name, value in brought.items():
            if name in rows:
                experts = list(rows[name].experts)
                state.setdefault(name, torch.full((rows[name].total, *value.shape[1:]), torch.nan))[experts] = value
            else:
                assert torch.equal(state.setdefault(name, value), value), name
    return state


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_the_ranks_together_bring_each_tensor(layout: Layout) -> None:
    want = tiny_hf("deepseek_v3").state_dict()
    got = joined(job(layout))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_a_buffer_comes_from_the_rank_that_trains_the_router_beside_it(layout: Layout) -> None:
    work = job(layout)
    for rank, model in enumerate(work.models):
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.fill_(rank)
    for rank, brought in enumerate(offers(work)):
        for layer in (1, 2, 3):
            if BIAS.format(layer) in brought:
                assert BIAS.format(layer).replace("e_score_correction_bias", "weight") in brought
                assert layout.index_of(rank) == 0
    assert sum(BIAS.format(1) in brought for brought in offers(work)) == 1
    owner = [rank for rank, brought in enumerate(offers(work)) if BIAS.format(2) in brought]
    assert owner == [layout.attention * (1 % layout.groups)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_a_rank_takes_what_it_holds_from_a_whole_state(layout: Layout) -> None:
    whole = tiny_hf("deepseek_v3", seed=1).state_dict()
    whole = {name: value + 1 if "correction" in name else value for name, value in whole.items()}
    work = job(layout)
    for model in work.models:
        restore_state(model, whole, strict=True)
        assert all(torch.equal(model.get_buffer(BIAS.format(layer)), whole[BIAS.format(layer)]) for layer in (1, 2, 3))
    assert all(torch.equal(value, whole[name]) for name, value in joined(work).items())


class Odd(nn.Module):
    """A buffer at the root, one in a module without parameters, extra state, and a parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny(tied=True)
        self.scale = nn.Module()
        self.scale.register_buffer("mean", torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))

    def get_extra_state(self) -> Any:
        return {"note": 1}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_a_buffer_of_a_block_belongs_to_its_router_though_its_experts_come_first() -> None:
    model = tiny()
    for layer in model.layers:
        layer.mlp.register_buffer("bias", torch.zeros(4))
        layer.mlp._modules["router"] = layer.mlp._modules.pop("router")
    assert next(model.layers[0].mlp.named_parameters())[0] == "experts.gate_up_proj"
    brought = offers(LocalJob(model, Layout(attention=1, ffn=1, groups=3)))
    for layer in range(3):
        assert [rank for rank in range(6) if f"layers.{layer}.mlp.bias" in brought[rank]] == [layer]


def test_odd_state_comes_from_the_first_attention_rank() -> None:
    model = Odd()
    work = LocalJob(model, Layout(attention=1, ffn=1, groups=2))
    for name in ("scale.mean", "seen", "_extra_state"):
        assert [rank for rank, brought in enumerate(offers(work)) if name in brought] == [0]
    assert tied_names(offers(work)[0]) == {"body.lm_head.weight": "body.embedding.weight"}
    restore_state(work.models[1], {**model.state_dict(), "seen": torch.ones(())}, strict=True)
    assert work.models[1].note == 1 and work.models[1].seen == 1
    assert "body.embedding.weight" not in needed_names(work.models[1])


def refused(model: nn.Module, state: dict[str, Tensor], sentence: str, strict: bool = True) -> None:
    """Check that a state is refused in these words."""
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        restore_state(model, state, strict=strict)


def test_a_tensor_that_does_not_fit_is_named() -> None:
    first, second = LocalJob(tiny(), Layout(attention=1, ffn=2)).models[:2]
    state = tiny().state_dict()
    less = {name: value for name, value in state.items() if name not in ("norm.weight", "norm.bias")}
    refused(first, less, "the checkpoint lacks norm.bias and 1 more")
    restore_state(second, less, strict=True)  # an F rank does not miss it
    refused(second, {**state, "extra": torch.ones(1)}, "the checkpoint holds the unknown extra:")
    restore_state(first, {**less, "extra": torch.ones(1)}, strict=False)
    more = tiny(experts=6).state_dict()
    name = "layers.0.mlp.experts.gate_up_proj"
    refused(second, more, "with shape [6, 16, 16], this model with [2, 16, 16]", strict=False)
    refused(first, {**state, "norm.bias": torch.ones(3)}, "holds norm.bias with shape [3], this model with [16]")
    assert rows_by_name(second)[name].experts == (0, 1)
