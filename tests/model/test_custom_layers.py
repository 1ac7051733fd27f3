"""Models that are not built as transformers builds them: their own `afd_layers`, experts, and ways to call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, plain_step
from tiny import TinyBlock, TinyConfig, TinyExperts, TinyLayer, TinyMLP, TinyOutput, tiny
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.model.experts_module import Flags, flags_of
from lightning_afd.model.port import suspended_layers
from lightning_afd.model.split import decoder_layers, find_moe_layers
from lightning_afd.placement import Layout

TOLERANCE = 1e-12
CONFIG = TinyConfig(layers=3, hidden=8, expert_width=4)


class OwnLayers(nn.Module):
    """A model without a list of layers: it names them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CONFIG.vocab, CONFIG.hidden)
        self.first, self.second, self.third = (TinyLayer(CONFIG, index) for index in range(3))
        self.second.mlp = TinyMLP(CONFIG)
        self.head = nn.Linear(CONFIG.hidden, CONFIG.vocab, bias=False)

    def afd_layers(self) -> list[tuple[nn.Module, nn.Module | None]]:
        return [(self.first, self.first.mlp.experts), (self.second, None), (self.third, self.third.mlp.experts)]

    def forward(self, input_ids: Tensor) -> TinyOutput:
        h_BSH = self.embedding(input_ids)
        for layer in (self.first, self.second, self.third):
            h_BSH = layer(h_BSH)
        return TinyOutput(self.head(h_BSH), (), None)


def own_layers(kind: type[OwnLayers] = OwnLayers) -> OwnLayers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().double()


def check(model: nn.Module, layout: Layout) -> LocalJob:
    """Train a step on this layout and compare it with the plain loop."""
    batches = make_batches(layout.attention, 2)
    job = LocalJob(model, layout)
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE
    return job


@pytest.mark.parametrize("layout", [Layout(attention=2, ffn=2), Layout(attention=1, ffn=2, groups=2)])
def test_layers_that_the_model_names(layout: Layout) -> None:
    check(own_layers(), layout)


def test_dense_layers_belong_to_the_segment_of_the_next_moe_layer() -> None:
    model = own_layers()
    layers = find_moe_layers(model)
    assert [layer.name for layer in layers] == ["first", "third"]
    stack = [(layer.name, layer.segment, layer.moe is not None) for layer in decoder_layers(model, layers)]
    assert stack == [("first", 0, True), ("second", 1, False), ("third", 1, True)]


def test_named_layers_may_lie_deeper_in_the_module_that_is_trained() -> None:
    outer = nn.ModuleDict({"model": own_layers()})
    assert [layer.name for layer in find_moe_layers(outer)] == ["model.first", "model.third"]


def test_without_the_method_such_a_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OwnLayers, "afd_layers")
    with pytest.raises(PlanError, match="belong to no list of decoder layers"):
        find_moe_layers(own_layers())


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (lambda model: [(nn.Identity(), None)], "not in the model: \\['Identity'\\]"),
        (lambda model: [(model.first, model.first.mlp)], "TinyBlock doesn't follow the experts contract"),
        (lambda model: [(model.second, None)], "has no routed experts"),
    ],
)
def test_wrong_layers_are_refused(monkeypatch: pytest.MonkeyPatch, pairs: Any, message: str) -> None:
    monkeypatch.setattr(OwnLayers, "afd_layers", pairs)
    with pytest.raises(PlanError, match=message):
        find_moe_layers(own_layers())


class TwoOutputs(TinyLayer):
    """Hands what its experts or its attention gave to the next layer, beside the hidden states."""

    after_experts = False

    def forward(self, h: tuple[Tensor, Tensor] | Tensor) -> Any:
        h_BSH, before = h if isinstance(h, tuple) else (h, torch.zeros_like(h))
        mixed = self.attention(self.norm1(h_BSH) + before)
        h_BSH = h_BSH + mixed
        y_BSH = self.mlp(self.norm2(h_BSH))
        return h_BSH + y_BSH, y_BSH.tanh() if self.after_experts else mixed.tanh()


def two_outputs(after_experts: bool) -> nn.Module:
    model = tiny(layers=3, hidden=8, expert_width=4).double()
    for layer in model.layers:
        layer.__class__ = type("Layer", (TwoOutputs,), {"after_experts": after_experts})
    model.norm.register_forward_pre_hook(lambda module, args: (args[0][0] + args[0][1],))
    return model


@pytest.mark.parametrize("after_experts", [False, True])
def test_layers_that_hand_on_more_than_hidden_states(after_experts: bool) -> None:
    """What depends on the experts makes the layer wait inside, also where its hidden states are rest + experts."""
    job = check(two_outputs(after_experts), Layout(attention=2, ffn=2))
    assert len(suspended_layers(job.models[0])) == (3 if after_experts else 0)


def test_such_layers_need_one_group() -> None:
    with pytest.raises(PlanError, match=r"more than its hidden states.*groups=1"):
        LocalJob(two_outputs(False), Layout(attention=1, ffn=1, groups=2))


class SharedBias(OwnLayers):
    """Computes something learned once, and gives it to all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CONFIG.hidden))

    def forward(self, input_ids: Tensor) -> TinyOutput:
        h_BSH, bias = self.embedding(input_ids), self.scale.exp() / 10
        for layer in (self.first, self.second, self.third):
            h_BSH = layer(h_BSH + bias)
        return TinyOutput(self.head(h_BSH), (), None)


def test_what_all_layers_share_is_trained_by_all() -> None:
    check(own_layers(SharedBias), Layout(attention=1, ffn=2))


def test_what_layers_of_other_groups_share_is_refused() -> None:
    job = LocalJob(own_layers(SharedBias), Layout(attention=1, ffn=1, groups=2))
    with pytest.raises(PlanError, match=r"beside their hidden states.*groups=1"):
        job.step(make_batches(1, 2))


class NamedArguments(TinyBlock):
    """Calls its experts by the names of their arguments, in another order, with rows and positions."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        _, w_TK, idx_TK = self.router(x_BSH.flatten(0, 1))
        return self.experts(w_TK=w_TK, idx_TK=idx_TK, x_TH=x_BSH.flatten(0, 1)).view_as(x_BSH)


class SwappedExperts(TinyExperts):
    """Takes the weights before the ids."""

    def forward(self, x_TH: Tensor, w_TK: Tensor, idx_TK: Tensor) -> Tensor:
        return super().forward(x_TH, idx_TK, w_TK)


@pytest.mark.parametrize("swapped", [False, True])
def test_ways_to_call_experts(swapped: bool) -> None:
    model = tiny(layers=2, hidden=8, expert_width=4).double()
    for layer in model.layers:
        layer.mlp.__class__ = NamedArguments
        layer.mlp.experts.__class__ = SwappedExperts if swapped else TinyExperts
    check(model, Layout(attention=1, ffn=2))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "width"), [(8, 4), (4, 4), (8, 8)])
def test_flags_of_experts_without_the_decorator(hidden: int, width: int, transposed: bool) -> None:
    class Undecorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            up, down = torch.zeros(2, 2 * width, hidden), torch.zeros(2, hidden, width)
            self.gate_up_proj = nn.Parameter(up.mT if transposed else up)
            self.down_proj = nn.Parameter(down.mT if transposed else down)

        def _apply_gate(self, z: Tensor) -> Tensor:
            return z

    assert flags_of(Undecorated()) == Flags(has_gate=True, has_bias=False, is_transposed=transposed)
    assert flags_of(nn.Linear(2, 2)) is None
