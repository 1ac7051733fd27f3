"""Routers in float32 inside models in lower precision: on A ranks they compute what they compute in the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from local_job import Batches, LocalJob, make_batches, micro_batch_loss, plain_step, worst_difference
from tiny import tiny_hf
from torch import Tensor, nn

from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.port import beside_experts
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import Layout
from lightning_afd.segments import UserStep

MODELS = ("deepseek_v3", "gpt_oss", "qwen3_moe")


@dataclass(frozen=True)
class Mix:
    """A dtype of the model, and a context of its steps."""

    dtype: torch.dtype = torch.float32
    keeps: bool = False
    """Whether what the model names stays in float32, as `from_pretrained(dtype=...)` leaves it."""
    autocast: torch.dtype | None = None

    def around(self) -> AbstractContextManager[Any]:
        """What Lightning enters around a step."""
        return nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast, cache_enabled=False)

    def convert(self, model: nn.Module) -> nn.Module:
        model.to(self.dtype)
        named = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()) if self.keeps else ():
            if any(part in name for part in named):
                tensor.data = tensor.data.float()
        return model


MIXES = {
    "bf16-true": Mix(torch.bfloat16),
    "bf16-true, some in float32": Mix(torch.bfloat16, keeps=True),
    "bf16-mixed": Mix(autocast=torch.bfloat16),
    "16-mixed": Mix(autocast=torch.float16),
    "16-mixed in a bf16 model": Mix(torch.bfloat16, keeps=True, autocast=torch.float16),
}


class MixedJob(LocalJob):
    """A job whose steps run in the context of a Mix."""

    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss_scale = 1.0

    def _user_step(self, rank: int, ids_BS: Tensor, weight: float) -> UserStep:
        step = super()._user_step(rank, ids_BS, weight)
        return replace(step, around=self.around, loss_scale=self.loss_scale)


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """The router of each MoE layer."""
    found = {}
    for layer in find_moe_layers(model):
        beside = [module for module in beside_experts(layer) if type(module).__name__.endswith("Router")]
        found[layer.name] = beside[0]
    return found


@dataclass(frozen=True)
class Routed:
    """One call of a router."""

    dtypes: tuple[torch.dtype, ...]
    """Of its input, its weight, and what it returned."""
    output: tuple[Tensor, ...]


def watched(model: nn.Module) -> tuple[nn.Module, dict[str, list[Routed]]]:
    """A copy whose routers, and those of its copies, put their calls down."""
    model, calls = copy.deepcopy(model), {name: [] for name in routers(model)}

    def note(name: str, router: nn.Module, args: Any, output: Any) -> None:
        if args[0].isfinite().all():  # the logits of another group's layer, not yet there, are NaN
            tensors = (args[0], router.weight, *output)
            calls[name].append(Routed(tuple(t.dtype for t in tensors), tuple(t.detach().clone() for t in output)))

    for name, router in routers(model).items():
        router.register_forward_hook(partial(note, name))
    return model, calls


def plain_loss(mix: Mix, model: nn.Module, ids_BS: Tensor) -> Tensor:
    with mix.around():
        return micro_batch_loss(model, ids_BS)


def runs(name: str, mix: Mix, groups: int, around: Any = None) -> tuple[Any, Any, Any, Any]:
    """Outcome and router calls of a job, and of the plain loop."""
    model = tiny_hf(name, aux=0.1, seed=4, num_hidden_layers=4)
    for router in routers(model).values():
        router.weight.data *= 30  # so that, with this seed, rounding makes no token choose another expert
    mix.convert(model)
    batches: Batches = make_batches(1, 2)
    (ours, calls), (theirs, expected) = watched(model), watched(model)
    job = MixedJob(ours, Layout(attention=1, ffn=1, groups=groups), micro_batches=2)
    job.around = around or mix.around
    return job.step(batches), calls, plain_step(theirs, batches, partial(plain_loss, mix)), expected


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_routers_compute_as_in_the_plain_loop(name: str, mix: str, groups: int) -> None:
    outcome, calls, (loss, grads), expected = runs(name, MIXES[mix], groups)
    assert calls.keys() == expected.keys()
    for layer, wanted in expected.items():
        assert [call.dtypes for call in calls[layer]] == [call.dtypes for call in wanted]
    first = next(iter(expected))
    for got, want in zip(calls[first], expected[first], strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got.output, want.output, strict=True))
    assert {n: g.dtype for n, g in outcome.replicas[0].items()} == {n: g.dtype for n, g in grads.items()}
    assert outcome.difference(loss, grads) < (0.02 if mix.startswith("16") else 0.05)


def test_comparison_sees_a_router_in_another_precision() -> None:
    _, calls, _, expected = runs("qwen3_moe", MIXES["bf16-mixed"], 1, around=nullcontext)
    for name, wanted in expected.items():
        assert [call.dtypes for call in calls[name]] != [call.dtypes for call in wanted]


@pytest.mark.parametrize(("name", "mix"), [("deepseek_v3", "bf16-true"), ("mixtral", "bf16-mixed")])
def test_weights_travel_in_float32_beside_tokens_in_less(name: str, mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = ExpertShard.forward, set()

    def spy(shard: ExpertShard, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor, keep: bool = True) -> Any:
        seen.add((x_TH.dtype, w_TK.dtype))
        return forward(shard, x_TH, idx_TK, w_TK, keep)

    monkeypatch.setattr(ExpertShard, "forward", spy)
    runs(name, MIXES[mix], 2)
    assert seen == {(torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_scaled_loss_scales_every_gradient_until_it_overflows(groups: int) -> None:
    """A loss in float16 cannot hold a large scale: that is the scaler's to see, not an error."""
    model, batches = tiny_hf("qwen3_moe", num_hidden_layers=2), make_batches(1, 2)
    loss, grads = plain_step(model, batches)
    job = MixedJob(
        model, Layout(attention=1, ffn=1, groups=groups), loss=lambda m, ids: micro_batch_loss(m, ids).half()
    )
    job.loss_scale = 2.0**4
    outcome = job.step(batches)
    assert outcome.loss == pytest.approx(loss, rel=1e-3)
    scaled = {name: gradient / 2**4 for name, gradient in outcome.replicas[0].items()}
    assert worst_difference(scaled, grads) < 1e-2
    job.loss_scale = 2.0**20
    assert not any(gradient.isfinite().all() for gradient in job.step(batches).replicas[0].values())
