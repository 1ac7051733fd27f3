"""The user's step as a coroutine: which layers can be cut, what is refused and how, and that nothing is left behind."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, micro_batch_loss, plain_step, step_of, user_step
from port_cases import IDS, ONE, CheckpointedLayer, model_of, refusal, run
from tiny import TinyLayer, TinyMoE, TinyRouter
from torch import Tensor, nn

from lightning_afd.model.coroutine import Host
from lightning_afd.model.port import Cut, install
from lightning_afd.model.split import decoder_layers, find_moe_layers
from lightning_afd.placement import Layout


class HalfLayer(TinyLayer):
    def forward(self, h_BSH: Tensor) -> Tensor:
        return h_BSH + self.attention(h_BSH) + 0.5 * self.mlp(self.norm2(h_BSH))


class NormedLayer(TinyLayer):
    def forward(self, h_BSH: Tensor) -> Tensor:
        return h_BSH + self.norm1(self.mlp(h_BSH))


class BlindLayer(TinyLayer):
    def forward(self, h_BSH: Tensor) -> Tensor:
        self.mlp(h_BSH)
        return h_BSH


@pytest.mark.parametrize("kind", [HalfLayer, NormedLayer, BlindLayer])
def test_layer_that_does_not_add_its_experts_is_suspended_at_them(kind: type[TinyLayer]) -> None:
    model, batches = model_of(kind), make_batches(1, 3)
    loss, grads = plain_step(model, batches)
    for name, parameter in model.named_parameters():  # experts that nothing uses get 0 here, as idle ones do
        grads.setdefault(name, torch.zeros_like(parameter))
    job = LocalJob(model, ONE)
    for _ in range(2):  # the second step knows the kind of the layers
        got = job.step(batches)
        assert abs(got.loss - loss) < 1e-12
        assert all((got.replicas[0][name] - grads[name]).abs().max() < 1e-12 for name in got.replicas[0])


@pytest.mark.parametrize("kind", [HalfLayer, NormedLayer, BlindLayer])
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_layer_that_does_not_add_its_experts_is_refused_with_groups(kind: type[TinyLayer], context: Any) -> None:
    """Also where the first call is an evaluation."""
    job = LocalJob(model_of(kind), Layout(attention=1, ffn=1, groups=2))
    with context():
        work = [[user_step(model, IDS)] for model in job.models[:2]]
        message = refusal(lambda: job.run(work, training=context is nullcontext))
    assert message.startswith("layers.0 is not additive")
    by = {HalfLayer: "0.5;", BlindLayer: "1;", NormedLayer: ""}[kind]
    assert f"differs from the identity by {by}" in message


class ScaledLayer(TinyLayer):
    def forward(self, h_BSH: Tensor) -> Tensor:
        return h_BSH + self.scale * self.mlp(self.norm2(h_BSH))


def test_trainable_scale_of_the_experts_gets_its_gradient_also_while_it_is_one() -> None:
    model = model_of(ScaledLayer)
    for layer in model.layers:
        layer.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
    assert LocalJob(model, ONE).step([[IDS]]).difference(*plain_step(model, [[IDS]])) < 1e-12
    two = LocalJob(model, Layout(attention=1, ffn=1, groups=2))
    assert refusal(lambda: two.step([[IDS]])).startswith("layers.0 is not additive")
    for layer in model.layers:
        layer.scale.requires_grad_(False)
    assert LocalJob(model, ONE).step([[IDS]]).difference(*plain_step(model, [[IDS]])) < 1e-12


def test_probing_leaves_no_gradients_and_no_random_state() -> None:
    model, batches = model_of(dropout=0.3, aux=0.1), make_batches(1, 1)
    torch.manual_seed(5)
    expected = plain_step(model, batches)
    torch.manual_seed(5)
    assert LocalJob(model, ONE).step(batches).difference(*expected) < 1e-12


class RoutedOutside(nn.Module):
    """A block that computes the routing weights from the logits that its router returned."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.router, self.experts = block.router, block.experts

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.flatten(0, 1)
        logits_TE, _, idx_TK = self.router(x_TH)
        return self.experts(x_TH, idx_TK, logits_TE.softmax(-1).gather(1, idx_TK)).view_as(x_BSH)


@pytest.mark.parametrize("aux", [0.0, 0.1])
@pytest.mark.parametrize("kind", [TinyLayer, CheckpointedLayer])
def test_routing_weights_may_be_made_from_the_logits_that_the_router_returned(kind: Any, aux: float) -> None:
    """The logits then have two gradients: from the weights and from the auxiliary loss."""
    model, batches = model_of(kind, aux=aux), make_batches(1, 2)
    model.layers[0].mlp = RoutedOutside(model.layers[0].mlp)
    job = LocalJob(model, ONE)
    for _ in range(2):
        assert job.step(batches).difference(*plain_step(model, batches)) < 1e-12


def reweigh(_router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits_TE, _, idx_TK = output
    return logits_TE, logits_TE.gather(1, idx_TK).softmax(-1), idx_TK


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_may_change_the_routing(when: str) -> None:
    model, batches = model_of(aux=0.1), make_batches(1, 2)
    hooked = copy.deepcopy(model)
    for router in (module for module in hooked.modules() if isinstance(module, TinyRouter)):
        router.register_forward_hook(reweigh)
    job = LocalJob(hooked if when == "before" else model, ONE)
    if when == "after":
        for router in (module for module in job.models[0].modules() if isinstance(module, TinyRouter)):
            router.register_forward_hook(reweigh)
    assert job.step(batches).difference(*plain_step(hooked, batches)) < 1e-12


class SilentLayer(TinyLayer):
    def forward(self, h_BSH: Tensor) -> Tensor:
        return h_BSH + self.mlp.shared(h_BSH)


def test_layer_must_call_its_experts() -> None:
    message = refusal(lambda: run(model_of(SilentLayer, shared_expert=True)))
    assert message.startswith("layers.0 did not call its experts")


def call_layers(model: TinyMoE, order: list[int]) -> Tensor:
    h = model.embedding(IDS)
    for index in order:
        h = model.layers[index](h)
    return h.square().mean()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 0, 1], "layers.0 (MoE layer 0) was called where MoE layer 1 was expected"),
        ([1, 0], "layers.1 (MoE layer 1) was called where MoE layer 0 was expected"),
        ([0, 1, 0], "layers.0 (MoE layer 0) was called where MoE layer 2 was expected"),
        ([0, 2], "layers.2 (MoE layer 2) was called where MoE layer 1 was expected"),
        ([0], "the step ended in MoE layer 1 of 3: every step must run all layers once"),
        ([], "the step ended in MoE layer 0 of 3: every step must run all layers once"),
    ],
)
def test_layers_must_run_once_and_in_order(order: list[int], words: str) -> None:
    assert words in refusal(lambda: run(model_of(layers=3), lambda model: call_layers(model, order)))


def test_model_must_not_be_called_twice() -> None:
    message = refusal(lambda: run(model_of(), lambda model: (model(IDS), micro_batch_loss(model, IDS))[1]))
    assert "layers.0 (MoE layer 0) was called where MoE layer 2 was expected" in message


def test_model_cannot_run_outside_of_a_step() -> None:
    job = LocalJob(model_of(), ONE)
    message = refusal(lambda: job.models[0](IDS))
    assert message.startswith("layers.0 was called outside of a training, validation, test or predict step")
    assert "experts" in refusal(lambda: job.models[0].layers[0].mlp(torch.zeros(1, 2, 8, dtype=torch.float64)))


@pytest.mark.parametrize(("place", "segment"), [("layers.0.norm1", 0), ("layers.1.norm2", 1), ("norm", 2)])
def test_users_exception_comes_out_with_its_place(place: str, segment: int) -> None:
    def fail(*args: Any) -> None:
        raise LookupError("no such label")

    model = model_of()
    model.get_submodule(place).register_forward_hook(fail)
    with pytest.raises(LookupError, match="no such label") as failure:
        run(model)
    assert failure.value.__notes__ == [
        f"rank 0 (A0) failed in A{segment}f0: layer {segment}, micro-batch 0",
    ]


@pytest.mark.parametrize("when", ["before", "after"])
def test_router_hooks_of_the_user_see_a_leaf_whenever_they_were_made(when: str) -> None:
    """A z-loss that the user's own hooks collect has its gradient, once."""

    def hooked(model: TinyMoE) -> list[Tensor]:
        found: list[Tensor] = []
        for router in (module for module in model.modules() if isinstance(module, TinyRouter)):
            router.register_forward_hook(lambda module, args, out: found.append(out[0]))
        return found

    def loss(model: TinyMoE, found: list[Tensor]) -> Tensor:
        found.clear()
        return micro_batch_loss(model, IDS) + 0.1 * sum(logits.square().mean() for logits in found)

    plain = model_of()
    loss(plain, hooked(plain)).backward()
    whole = model_of()
    found = hooked(whole) if when == "before" else []
    job = LocalJob(whole, ONE)
    model: Any = job.models[0]
    found = hooked(model) if when == "after" else found
    job.run([[step_of(partial(loss, model, found), 1.0)]])
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in plain.named_parameters():
        if ".experts." not in name:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-14)


def test_undo_puts_back_a_forward_that_the_instance_had() -> None:
    model = model_of()
    first, second = model.layers
    wrapped = partial(TinyLayer.forward, first)
    first.forward = wrapped
    cut = Cut(host=Host(), segments=(0, 1, 2), may_suspend_inside=True, only_hidden=False, stands_in=False)
    undo = install(cut, decoder_layers(model, find_moe_layers(model)))
    assert first.forward is not wrapped and "forward" in vars(second)
    undo()
    assert first.forward is wrapped and "forward" not in vars(second)
    assert not any(module._forward_hooks for module in model.modules())
