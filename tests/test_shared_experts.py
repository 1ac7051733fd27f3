"""Shared experts on F ranks: loss and all gradients equal the plain loop in float64, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from local_job import Batches, LocalJob, make_batches, micro_batch_loss, plain_step, user_step
from port_cases import CheckpointedLayer, refusal
from tiny import TinyBlock, TinyMoE, TinyRouter, tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd import reduction
from lightning_afd.model import routing
from lightning_afd.model.place import dense_parameters, is_expert, is_owned
from lightning_afd.model.shared import WithShared
from lightning_afd.placement import Layout
from lightning_afd.recipes.survey import language_loss
from lightning_afd.recipes.tiny_models import build
from lightning_afd.schedule.orders import ORDERS

LAYOUTS = [
    Layout(attention=1, ffn=1),
    Layout(attention=2, ffn=2),
    Layout(attention=1, ffn=2),
    Layout(attention=2, ffn=1, groups=2),
]
ONE_TWO, TWO_TWO = Layout(attention=1, ffn=2), Layout(attention=2, ffn=2)
TOLERANCE = 1e-12


class GatedBlock(TinyBlock):
    """Weighs the shared experts by a gate, and calls them before the routed ones."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        shared_TH = self.shared(x_TH)
        _, w_TK, idx_TK = self.router(x_TH)
        y_TH = self.experts(x_TH, idx_TK, w_TK) + torch.sigmoid(self.gate(x_TH)) * shared_TH
        return y_TH.view_as(x_BSH)


class Scaled(GatedBlock):
    """Weighs them by something trainable, too, that is 1 at the start."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        _, w_TK, idx_TK = self.router(x_TH)
        shared_TH = self.scale * torch.sigmoid(self.gate(x_TH)) * self.shared(x_TH)
        return (self.experts(x_TH, idx_TK, w_TK) + shared_TH).view_as(x_BSH)


def model_of(*kinds: type[TinyBlock], **sizes: Any) -> TinyMoE:
    """A small float64 model whose MoE layers 1, 2 ... are of these kinds in turn, behind a dense one."""
    small = {"layers": 3, "hidden": 8, "expert_width": 4, "dense_first": 1, "aux": 0.05, "tied": True}
    model = tiny(**{**small, "shared_expert": True, **sizes})
    for layer, kind in zip(model.layers[1:], cycle(kinds or (TinyBlock, GatedBlock)), strict=False):
        layer.mlp.__class__ = kind
        if issubclass(kind, GatedBlock):
            layer.mlp.gate = nn.Linear(model.config.hidden, 1)
        if kind is Scaled:
            layer.mlp.scale = nn.Parameter(torch.ones(model.config.hidden))
    return model.double()


def job_of(model: nn.Module, layout: Layout, order: str = "af-pipe", **choices: Any) -> LocalJob:
    return LocalJob(model, layout, order, shared_experts="ffn", **choices)


def difference(model: nn.Module, layout: Layout, batches: Batches, **choices: Any) -> float:
    return job_of(model, layout, **choices).step(batches).difference(*plain_step(model, batches))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_step_equals_the_plain_loop(layout: Layout, order: str) -> None:
    model, batches = model_of(), make_batches(layout.attention, 3)
    job, want = job_of(model, layout, order), plain_step(model, batches)
    for _ in range(2):  # the first step looks at how layers add their shared experts
        assert job.step(batches).difference(*want) < TOLERANCE
    for name, _ in model.named_parameters():
        held = [own for one in job.models if is_owned(own := one.get_parameter(name))]
        if ".shared." in name:
            assert len(held) == layout.ffn and not any(is_expert(own) for own in held)
            assert all(torch.equal(own.grad, held[0].grad) for own in held)
        elif ".gate." in name:
            assert len(held) == layout.attention


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe"])
def test_models_of_transformers_equal_the_plain_loop(name: str) -> None:
    """DeepSeek-V3 adds its shared experts, Qwen2-MoE weighs them by a gate."""
    model = tiny_hf(name).double() if name == "deepseek_v3" else build(name, torch.float64)
    batches = make_batches(2, 2)
    outcome = job_of(model, TWO_TWO, loss=language_loss).step(batches)
    assert outcome.difference(*plain_step(model, batches, language_loss)) < TOLERANCE


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("recompute_experts", [False, True])
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
def test_recompute_gives_the_same_gradients(recompute: str, recompute_experts: bool, groups: int) -> None:
    model, batches = model_of(), make_batches(1, 2)
    layout = Layout(attention=1, ffn=2, groups=groups)
    job = job_of(model, layout, recompute=recompute, recompute_experts=recompute_experts)
    for _ in range(2):
        assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


def test_layers_may_checkpoint_themselves() -> None:
    model, batches = model_of(), make_batches(1, 2)
    for layer in model.layers:
        layer.__class__ = CheckpointedLayer
    job = job_of(model, ONE_TWO)
    for _ in range(2):
        assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_equals_the_plain_model_also_as_the_first_call(context: Any) -> None:
    model, batches = model_of(), make_batches(2, 1)
    job = job_of(model, TWO_TWO)
    for _ in range(2):
        with context():
            got = job.run([[user_step(job.models[a], batches[a][0])] for a in (0, 1)], training=False)
            want = [micro_batch_loss(model, ids).item() for (ids,) in batches]
        assert [mine[0].item() for mine in got] == pytest.approx(want, rel=1e-12)
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


def test_idle_ffn_rank_has_the_group_s_gradients() -> None:
    model, batches = model_of(), make_batches(1, 2)
    for router in (module for module in model.modules() if isinstance(module, TinyRouter)):
        router.register_forward_hook(lambda _m, _a, out: (*out[:2], torch.arange(2).expand_as(out[2])))
    job = job_of(model, ONE_TWO)
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE
    assert job.engines[2].experts.received_rows == 0
    shared = [[p.grad for p in dense_parameters(one)] for one in job.models[1:]]
    assert len(shared[0]) == 4 and all(torch.equal(a, b) for a, b in zip(*shared, strict=True))


def test_step_without_any_label_gives_zero_gradients() -> None:
    job = job_of(model_of(), ONE_TWO)
    job.run([[user_step(job.models[0], torch.zeros(2, 1, dtype=torch.int64), 0.0)]])
    owned = [p.grad for one in job.models[1:] for p in one.parameters() if is_owned(p)]
    assert owned and all(grad is not None and not grad.any() for grad in owned)


def test_only_some_layers_may_have_shared_experts_and_they_may_be_frozen() -> None:
    model = model_of(TinyBlock, layers=4)
    model.layers[2].mlp.shared = None
    model.layers[3].mlp.shared.requires_grad_(False)
    assert difference(model, TWO_TWO, make_batches(2, 2)) < TOLERANCE


def test_rows_travel_in_half_precision_under_autocast() -> None:
    model, batches = model_of().float(), make_batches(1, 2)
    around = partial(torch.autocast, "cpu", dtype=torch.bfloat16)

    def loss_of(one: nn.Module, ids: Tensor) -> Tensor:
        with around():
            return micro_batch_loss(one, ids).detach()

    job = job_of(model, ONE_TWO)
    work = [[replace(user_step(job.models[0], ids, 0.5), around=around) for ids in batches[0]]]
    got = [float(loss.detach()) for loss in job.run(work)[0]]
    assert got == pytest.approx([float(loss_of(model, ids)) for ids in batches[0]], rel=2e-2)
    shared = [p.grad for p in dense_parameters(job.models[1])]
    assert {grad.dtype for grad in shared} == {torch.float32} and all(grad.any() for grad in shared)


def test_no_row_travels_for_shared_experts() -> None:
    model, batches = model_of(TinyBlock, dense_first=0), make_batches(2, 2)
    jobs = [LocalJob(model, TWO_TWO, shared_experts=place) for place in ("attention", "ffn")]
    for job in jobs:
        job.step(batches)
        job.step(batches)
    rows = sum(engine.experts.received_rows for engine in jobs[0].engines[2:])  # of one step
    before, after = (job.network.sent_bytes for job in jobs)
    assert before.keys() == after.keys()

    def more(channel: str) -> int:
        return sum(after[route] - count for route, count in before.items() if route[0] == channel)

    assert (more("Cf"), more("Db")) == (0, 0)
    messages = 2 * 2 * 3 * 4  # steps, micro-batches, layers, pairs of ranks; sections are padded to 16 bytes
    assert 2 * rows * 12 - 32 * messages <= more("Df") <= 2 * rows * 12 + 2 * 32 * messages  # weight (8) and id (4)
    assert 2 * rows * 8 - 16 * messages <= more("Cb") <= 2 * rows * 8 + 16 * messages


def test_comparison_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = model_of(GatedBlock), make_batches(1, 2)
    backward, turns = WithShared.backward, routing._turns

    def without_dw(self: WithShared, *args: Any) -> Any:
        dx_TH, dw_TS, pending = backward(self, *args)
        return dx_TH, torch.cat([dw_TS[:, :-1], torch.zeros_like(dw_TS[:, -1:])], 1), pending

    def broken(target: Any, name: str, value: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return difference(model, ONE_TWO, batches)

    assert broken(reduction, "sum_over_replicas", lambda *args: None) > 1e-3  # one A rank: only F ranks need the sum
    assert broken(WithShared, "backward", without_dw) > 1e-3
    assert broken(routing, "_turns", lambda hit_NT: torch.zeros_like(turns(hit_NT))) > 1e-3


class _Block(TinyBlock):
    """Adds `self.combine(x, shared)` to its routed experts."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        _, w_TK, idx_TK = self.router(x_TH)
        return (self.experts(x_TH, idx_TK, w_TK) + self.combine(x_TH)).view_as(x_BSH)


class OtherInput(_Block):
    def combine(self, x_TH: Tensor) -> Tensor:
        return self.shared(2 * x_TH)


class DetachedInput(_Block):
    def combine(self, x_TH: Tensor) -> Tensor:
        return self.shared(x_TH.detach())


class FrozenPath(_Block):
    """Part of what leads to the input has no gradient."""

    def combine(self, x_TH: Tensor) -> Tensor:
        return self.shared(0.5 * x_TH + 0.5 * x_TH.detach())


class Halved(_Block):
    def combine(self, x_TH: Tensor) -> Tensor:
        return 0.5 * self.shared(x_TH)


class Skipped(_Block):
    def combine(self, x_TH: Tensor) -> Tensor:
        return torch.zeros_like(x_TH)


class Twice(_Block):
    def combine(self, x_TH: Tensor) -> Tensor:
        return self.shared(x_TH) + self.shared(x_TH)


class NotAdditive(_Block):
    def combine(self, x_TH: Tensor) -> Tensor:
        return self.shared(x_TH)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return 0.5 * super().forward(x_BSH)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OtherInput, "another input than its routed experts"),
        (DetachedInput, "another input than its routed experts"),
        (FrozenPath, "another input than its routed experts"),
        (Halved, "does not add its shared experts as they are"),
        (Skipped, "did not call its shared experts"),
        (Twice, "more than once"),
        (NotAdditive, "is not additive"),
    ],
)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[-1]], ids=Layout.describe)
def test_layer_that_treats_them_otherwise_is_refused(kind: type[TinyBlock], message: str, layout: Layout) -> None:
    job = job_of(model_of(kind), layout)
    text = refusal(lambda: job.step(make_batches(layout.attention, 1)))
    assert text.startswith("layers.1 ") and message in text


def test_trainable_scale_of_gated_shared_experts_is_refused_while_it_is_one() -> None:
    assert "nor times the sigmoid" in refusal(lambda: job_of(model_of(Scaled), LAYOUTS[0]).step(make_batches(1, 1)))


def without(model: TinyMoE) -> None:
    for layer in model.layers[1:]:
        layer.mlp.shared = None


def with_two(model: TinyMoE) -> None:
    model.layers[1].mlp.shared_mlp = nn.Linear(8, 8)


def with_dropout(model: TinyMoE) -> None:
    model.layers[1].mlp.shared.drop = nn.Dropout(0.1)


def with_buffer(model: TinyMoE) -> None:
    model.layers[1].mlp.shared.register_buffer("count", torch.zeros(1))


def tied(model: TinyMoE) -> None:
    model.layers[2].mlp.shared.up.weight = model.layers[1].mlp.shared.up.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, "shared_experts='ffn': this model has none"),
        (with_two, "layers.1 has 2 modules with shared experts"),
        (with_dropout, "the shared experts of layers.1 have dropout"),
        (with_buffer, "the shared experts of layers.1 have buffers"),
        (tied, "the shared experts of layers.2 are tied"),
    ],
)
def test_model_is_refused_before_it_is_split(change: Callable[[TinyMoE], None], message: str) -> None:
    model = model_of()
    change(model)
    assert message in refusal(lambda: job_of(model, LAYOUTS[0]))


def test_split_model_cannot_serve_with_the_other_choice() -> None:
    job = job_of(model_of(), LAYOUTS[0])
    assert "with shared experts on F ranks" in refusal(lambda: LocalJob(job.models[0], LAYOUTS[0]))
