"""Optimizer state by name: groups in any order, odd optimizers, and what is refused."""

import re
from typing import Any

import pytest
import torch
from tiny import tiny
from torch import nn

from lightning_afd.checkpoint import optimizer_state
from lightning_afd.checkpoint.tensors import Part
from lightning_afd.errors import CheckpointError
from lightning_afd.optimizer import drop_foreign
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import LocalJob

EXPERTS = "layers.0.mlp.experts.down_proj"


def placed(rank: int = 1) -> nn.Module:
    """One rank's part of a model on 1A + 2F: rank 1 holds experts 0 and 1."""
    return LocalJob(tiny(), Layout(attention=1, ffn=2)).models[rank]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, experts first."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if "experts" in name], "lr": 0.5},
        {"params": [p for name, p in named.items() if "experts" not in name]},
    ]


def stepped(model: nn.Module, kind: Any = torch.optim.AdamW) -> tuple[torch.optim.Optimizer, Any, dict[str, Any]]:
    """An optimizer after one step, with the names of all of its parameters and those that the rank trains."""
    optimizer = kind(groups_of(model), lr=0.1)
    names = optimizer_state.group_names(optimizer, model)
    drop_foreign(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, names, optimizer_state.held_parameters(optimizer, model, names)


def test_names_are_those_of_all_ranks() -> None:
    _, names, held = stepped(placed())
    whole = [name for name, _ in tiny().named_parameters()]
    assert names == [[n for n in whole if "experts" in n], [n for n in whole if "experts" not in n]]
    assert list(held) == names[0]


def test_names_are_the_same_where_tied_modules_are_on_other_ranks() -> None:
    whole = tiny(tied=True)
    for model in LocalJob(whole, Layout(attention=1, ffn=1, groups=2)).models:
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]


def test_state_is_cut_like_its_experts_and_counts_once() -> None:
    optimizer, names, held = stepped(placed())
    tensors, plain = optimizer_state.dump_state(optimizer, held)
    assert not plain and tensors.keys() == held.keys()
    assert isinstance(tensors[EXPERTS]["exp_avg"], Part) and tensors[EXPERTS]["exp_avg"].rows.experts == (0, 1)
    assert tensors[EXPERTS]["step"].shape == ()
    groups = optimizer_state.dump_groups(optimizer, names)
    assert [(group["lr"], group["params"]) for group in groups] == [(0.5, names[0]), (0.1, names[1])]


class Counting(torch.optim.SGD):
    """An optimizer with a state that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        """Count."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_plain_state_comes_back() -> None:
    optimizer, names, held = stepped(placed(), Counting)
    tensors, plain = optimizer_state.dump_state(optimizer, held)
    assert not tensors and plain[EXPERTS] == {"count": 1}
    other, _, own = stepped(placed(), Counting)
    groups = [{**group, "lr": 0.7} for group in optimizer_state.dump_groups(optimizer, names)]
    optimizer_state.restore(other, own, groups, {name: {"count": 5} for name in own})
    assert other.state[own[EXPERTS]] == {"count": 5} and other.param_groups[1]["lr"] == 0.7


class Mixing(torch.optim.SGD):
    """An optimizer that keeps one row for all experts of a rank, as Adafactor does for their biases."""

    def step(self, closure: Any = None) -> Any:
        """Keep something."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = parameter.detach().mean(0, keepdim=True)


def test_state_that_mixes_experts_is_refused() -> None:
    optimizer, _, held = stepped(placed(), Mixing)
    with pytest.raises(CheckpointError, match=r"row of layers.0.mlp.experts.gate_up_proj has shape \[1, 16, 16\]"):
        optimizer_state.dump_state(optimizer, held)


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ([["a"]], "has 1 parameter groups, this one has 2"),
        ([["a", "x"], ["b"]], "only the checkpoint's optimizer trains x"),
        ([["a"], []], "group 1 of the checkpoint's optimizer has 0 parameters, this one 1"),
        ([["a"], ["c"]], "only this optimizer trains b"),
        ([[0, 1], [2]], "group 0 of the checkpoint's optimizer has 2 parameters, this one 1"),
    ],
)
def test_other_groups_are_refused(saved: list[list[Any]], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        optimizer_state.keys_of([{"params": params} for params in saved], [["a"], ["b"]])


def test_numbers_of_torch_mean_the_order_of_the_groups() -> None:
    whole = tiny()
    reference, names, _ = stepped(whole)
    saved = reference.state_dict()
    keys = optimizer_state.keys_of(saved["param_groups"], names)
    assert torch.equal(
        saved["state"][keys[EXPERTS]]["exp_avg"], reference.state[whole.get_parameter(EXPERTS)]["exp_avg"]
    )
    by_name = {name: saved["state"][number] for name, number in keys.items()}
    again = optimizer_state.by_number(optimizer_state.dump_groups(reference, names), by_name)
    assert again == saved
