"""The tail of the step (norm, head, loss) on F ranks: loss and gradients equal the plain loop, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_job import Batches, LocalJob, make_batches, micro_batch_loss, plain_step, user_step
from port_cases import refusal
from tiny import TinyLayer, TinyMLP, TinyMoE, TinyOutput, tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd import reduction
from lightning_afd.errors import PlanError
from lightning_afd.model.place import is_owned
from lightning_afd.model.port import suspended_layers
from lightning_afd.placement import Head, Layout
from lightning_afd.recipes.survey import language_loss
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.segments import MicroBatch

TOLERANCE = 1e-12
SMALL: dict[str, Any] = {"layers": 3, "hidden": 8, "expert_width": 4}
EVERYTHING: dict[str, Any] = {"aux": 0.05, "shared_expert": True, "dense_first": 1, "layers": 4}
LAYOUTS = [(1, 1, 1), (2, 2, 1), (1, 3, 1), (3, 2, 1), (2, 1, 2), (1, 2, 3)]


def model_of(**sizes: Any) -> TinyMoE:
    """A small float64 model."""
    return tiny(**{**SMALL, **sizes}).double()


def on_ffn(attention: int, ffn: int, groups: int = 1) -> Layout:
    return Layout(attention=attention, ffn=ffn, groups=groups, head="ffn")


def difference(model: nn.Module, layout: Layout, batches: Batches, order: str = "af-pipe") -> float:
    """How far one step is from the plain loop."""
    return LocalJob(model, layout, order).step(batches).difference(*plain_step(model, batches))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("attention", "ffn", "groups"), LAYOUTS)
def test_step_equals_the_plain_loop(attention: int, ffn: int, groups: int, order: str) -> None:
    batches = make_batches(attention, 3)
    assert difference(model_of(), on_ffn(attention, ffn, groups), batches, order) < TOLERANCE


@pytest.mark.parametrize(("attention", "ffn", "groups"), LAYOUTS)
def test_auxiliary_loss_and_everything_else(attention: int, ffn: int, groups: int) -> None:
    assert difference(model_of(**EVERYTHING), on_ffn(attention, ffn, groups), make_batches(attention, 2)) < TOLERANCE


@pytest.mark.parametrize(("attention", "ffn", "groups"), [(2, 2, 1), (3, 2, 2)])
def test_shared_experts_beside_the_tail(attention: int, ffn: int, groups: int) -> None:
    model, batches = model_of(**EVERYTHING), make_batches(attention, 2)
    job = LocalJob(model, on_ffn(attention, ffn, groups), shared_experts="ffn")
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


def test_shared_experts_on_ranks_without_a_tail_are_refused() -> None:
    with pytest.raises(PlanError, match="ffn=3 is more than attention=1: leave one of the two"):
        LocalJob(model_of(shared_expert=True), on_ffn(1, 3), shared_experts="ffn")


@pytest.mark.parametrize("groups", [1, 2])
def test_other_sizes(groups: int) -> None:
    """One layer, one micro-batch, replicas that bring different numbers of them, some of them masked."""
    assert difference(model_of(layers=1, aux=0.1), on_ffn(1, 1, groups), make_batches(1, 1)) < TOLERANCE
    batches = [replica[:count] for replica, count in zip(make_batches(3, 4), [2, 4, 1], strict=True)]
    batches[0].insert(1, torch.zeros(2, 1, dtype=torch.int64))
    assert difference(model_of(aux=0.1), on_ffn(3, 2, groups), batches) < TOLERANCE


@pytest.mark.parametrize("frozen", ["embedding", "norm", "lm_head", "layers.2", "router"])
def test_frozen_parameters_get_no_gradient(frozen: str) -> None:
    model = model_of(aux=0.1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert difference(model, on_ffn(2, 1), make_batches(2, 2)) < TOLERANCE


@pytest.mark.parametrize(("head", "groups"), [("ffn", 1), ("ffn", 2), ("attention", 2)])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_equals_the_plain_model(context: Any, head: Head, groups: int) -> None:
    """Also the auxiliary loss, as the very first call, and in the middle of training."""
    model, batches = model_of(**EVERYTHING), make_batches(2, 1)
    layout = Layout(attention=2, ffn=2, groups=groups, head=head)
    job = LocalJob(model, layout)
    for _ in range(2):
        with context():
            work = [[user_step(job.models[r], batches[layout.index_of(r)][0])] for r in range(2 * groups)]
            tails = [[user_step(job.models[layout.tail_rank(a)], batches[a][0])] for a in (0, 1)]
            results = job.run(work, tails=tails, training=False)
            expected = [micro_batch_loss(model, ids) for (ids,) in batches]
        assert [mine[0].item() for mine in results] == pytest.approx([loss.item() for loss in expected], rel=1e-12)
        assert all(p.grad is None for own in job.models for p in own.parameters())
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


class ScaledLayer(TinyLayer):
    """Not additive: what the experts return passes through a tanh."""

    def forward(self, h_BSH: Tensor) -> Tensor:
        return super().forward(h_BSH).tanh()


def test_layers_that_wait_inside_for_their_experts() -> None:
    model = model_of(aux=0.1)
    for layer in model.layers:
        layer.__class__ = ScaledLayer
    batches, layout = make_batches(2, 2), on_ffn(2, 2)
    job = LocalJob(model, layout)
    with torch.no_grad():
        work = [[user_step(job.models[a], batches[a][0])] for a in (0, 1)]
        tails = [[user_step(job.models[layout.tail_rank(a)], batches[a][0])] for a in (0, 1)]
        results = job.run(work, tails=tails, training=False)
        assert results[0][0].item() == pytest.approx(micro_batch_loss(model, batches[0][0]).item(), rel=1e-12)
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE
    assert len(suspended_layers(job.models[0])) == 3


def test_dense_layers_behind_the_last_experts_belong_to_the_tail() -> None:
    model = model_of(layers=4)
    model.layers[3].mlp = TinyMLP(model.config).double()
    job = LocalJob(model, on_ffn(1, 2))
    batches = make_batches(1, 2)
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE
    held = [{name for name, p in own.named_parameters() if is_owned(p)} for own in job.models]
    tail = {name for name in held[0] | held[1] if name.startswith(("layers.3", "norm", "lm_head"))}
    assert not tail & held[0] and tail < held[1] and not tail & held[2]
    assert "embedding.weight" in held[0] and all(".experts." in name for name in held[1] - tail)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_transformers_models(name: str) -> None:
    model = tiny_hf(name, aux=0.05).double()
    batches = make_batches(2, 2)
    outcome = LocalJob(model, on_ffn(2, 1), loss=language_loss).step(batches)
    assert outcome.difference(*plain_step(model, batches, language_loss)) < 1e-6


class Extended(TinyMoE):
    """Learned parts of its own: `scale` and `value`, registered behind the layers, used behind or before them."""

    early = False

    def forward(self, input_ids: Tensor) -> TinyOutput:
        out = super().forward(input_ids)
        return TinyOutput(self.value(out.logits) * self.scale, out.router_logits, out.aux_loss)

    def embed(self, _module: nn.Module, _args: Any, h_BSH: Tensor) -> Tensor:
        return h_BSH * self.scale if self.early else h_BSH


def extended(early: bool) -> Extended:
    model = model_of()
    model.__class__ = Extended
    model.early = early
    model.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    model.value = nn.Linear(32, 32).double()
    model.embedding.register_forward_hook(model.embed)
    return model


def test_what_the_module_adds_behind_its_layers_belongs_to_the_tail() -> None:
    assert difference(extended(early=False), on_ffn(2, 2), make_batches(2, 2)) < TOLERANCE


def test_what_is_used_on_both_sides_of_the_layers_is_refused() -> None:
    job = LocalJob(extended(early=True), on_ffn(1, 1))
    message = refusal(lambda: job.step(make_batches(1, 1)))
    assert "use something learned" in message and "head='attention'" in message


class Skipping(TinyMoE):
    """Its final norm also gets the hidden states from before, or from between, the layers."""

    earliest = 0

    def forward(self, input_ids: Tensor) -> TinyOutput:
        states = [self.embedding(input_ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return TinyOutput(self.lm_head(self.norm(states[-1] + states[self.earliest])), (), None)


@pytest.mark.parametrize("earliest", [0, 1])
@pytest.mark.parametrize("layout", [Layout(attention=1, ffn=1, head="ffn"), Layout(attention=1, ffn=1, groups=2)])
def test_a_tail_that_uses_earlier_hidden_states_is_refused(layout: Layout, earliest: int) -> None:
    """Elsewhere than on the ranks of these layers such states are stand-ins: the loss would be another one."""
    model = model_of()
    model.__class__ = Skipping
    model.earliest = earliest
    if layout.groups == 1:
        plain = LocalJob(model, Layout(attention=1, ffn=1)).step(make_batches(1, 2))
        assert plain.difference(*plain_step(model, make_batches(1, 2))) < TOLERANCE
    message = refusal(lambda: LocalJob(model, layout).step(make_batches(1, 2)))
    assert "that lies on ranks of other segments" in message


def test_tied_embeddings_are_refused() -> None:
    message = refusal(lambda: LocalJob(model_of(tied=True), on_ffn(1, 1)))
    assert message == (
        "head='ffn' cannot move lm_head away from attention ranks, because its weight is also that of embedding: "
        "untie them (tie_word_embeddings=False) or use head='attention'"
    )


def test_logits_that_were_not_announced_are_refused() -> None:
    model = tiny_hf("qwen3_moe").double()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, output_router_logits=True).loss

    job = LocalJob(model, on_ffn(1, 1), loss=loss)
    assert "set output_router_logits=True in the model's config" in refusal(lambda: job.step(make_batches(1, 1)))


def test_layers_that_return_more_than_hidden_states_are_refused() -> None:
    class Pair(TinyLayer):
        def forward(self, h: Any) -> Any:
            return super().forward(h[0] if isinstance(h, tuple) else h), None

    model = model_of()
    for layer in model.layers:
        layer.__class__ = Pair
    with pytest.raises(PlanError, match=r"such a model needs groups=1 or \(1, f\), and head='attention'"):
        LocalJob(model, on_ffn(1, 1))


def test_comparison_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches, layout = model_of(aux=0.1), make_batches(2, 2), on_ffn(2, 2)

    def broken(target: Any, name: str, value: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return difference(model, layout, batches)

    take_back = MicroBatch.take_back
    assert difference(model, layout, batches) < TOLERANCE
    assert broken(MicroBatch, "take_back", lambda self, dh: take_back(self, torch.zeros_like(dh))) > 1e-3
    assert broken(MicroBatch, "fill_in", lambda self, layer, logits: self.stand_ins[layer].detach().zero_()) > 1e-6
    assert broken(MicroBatch, "logits_leaf", lambda self, layer: None) > 1e-6
    assert broken(reduction, "sum_over_replicas", lambda *args: None) > 1e-3
