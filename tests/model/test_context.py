"""Contexts of a step stay in their coroutine, and activation checkpointing works where it can."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, micro_batch_loss, plain_step, step_of, user_step
from port_cases import IDS, ONE, CheckpointedLayer, model_of, refusal, run
from tiny import TinyMoE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_afd.model.context import context_state
from lightning_afd.segments import UserStep

variable: ContextVar[str] = ContextVar("variable", default="unset")


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "('cpu', False, torch.bfloat16) became ('cpu', True"),
        (torch.no_grad, "('grad', True, False) became ('grad', False, False)"),
        (torch.inference_mode, "('grad', True, False) became ('grad', False, True)"),
        (lambda: sdpa_kernel(SDPBackend.MATH), "('sdpa', "),
        (lambda: torch.device("cpu"), "('function modes',) became ('function modes', "),
        (lambda: torch.autograd.graph.save_on_cpu(), "('saved tensor hooks',) became ('saved tensor hooks', "),
    ],
)
def test_context_around_the_model_is_refused(context: Callable[[], Any], words: str) -> None:
    def step(model: TinyMoE) -> Tensor:
        with context():
            return micro_batch_loss(model, IDS)

    before = context_state()
    message = refusal(lambda: run(model_of(), step))
    assert "holds a context at layers.0 that would leak" in message and words in message
    assert context_state() == before


def test_context_that_is_left_before_or_entered_after_the_model_is_fine() -> None:
    def step(model: TinyMoE) -> Tensor:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            weight = torch.ones(())
        loss = micro_batch_loss(model, IDS)
        with torch.autocast("cpu"), torch.autograd.graph.save_on_cpu():
            return loss * weight

    model = model_of()
    assert run(model, step).item() == pytest.approx(plain_step(model, [[IDS]])[0], rel=1e-12)


def test_context_of_the_step_is_entered_at_each_resume_and_left_at_each_suspension() -> None:
    seen: list[tuple[str, bool]] = []
    job = LocalJob(model_of(), ONE)
    handlers: Any = job.engines[0].runtime._tables[job.engines[0].worker]
    for key, handler in list(handlers.items()):
        handlers[key] = lambda action, h=handler: (seen.append((str(action), autocast_on())), h(action))
    for layer in job.models[0].layers:
        layer.norm1.register_forward_hook(lambda *args: seen.append(("layer", autocast_on())))

    def step() -> Tensor:
        loss = micro_batch_loss(job.models[0], IDS)
        seen.append(("tail", autocast_on()))
        return loss

    around = partial(torch.autocast, "cpu", torch.bfloat16)
    job.run([[UserStep(function=step, around=around, weight=1.0, loss_of=lambda loss: loss)]])
    assert [name for name, on in seen if on] == ["layer", "layer", "tail"]
    assert len(seen) > 15


def autocast_on() -> bool:
    return bool(torch.is_autocast_enabled("cpu"))


class ReentrantLayer(CheckpointedLayer):
    reentrant = True


@pytest.mark.parametrize("sizes", [{}, {"aux": 0.1, "shared_expert": True}, {"aux": 0.1, "dropout": 0.2}])
def test_checkpointing_inside_the_layer_is_equal(sizes: dict[str, Any]) -> None:
    batches = make_batches(1, 1 if "dropout" in sizes else 3)
    torch.manual_seed(3)
    expected = plain_step(model_of(**sizes), batches)
    job = LocalJob(model_of(CheckpointedLayer, **sizes), ONE)
    calls: list[int] = []
    job.models[0].layers[1].norm1.register_forward_hook(lambda *args: calls.append(1))
    for _ in range(2):  # the first step probes the layers, the second doesn't
        torch.manual_seed(3)
        assert job.step(batches).difference(*expected) < 1e-12
    assert len(calls) == 4 * len(batches[0])  # everything was computed twice


class RecomputedLayer(CheckpointedLayer):
    """The derivative with respect to the experts needs a saved tensor, so the probe computes the layer again."""

    def inner(self, h_BSH: Tensor) -> Tensor:
        return (h_BSH + self.mlp(self.norm2(h_BSH))) * torch.ones_like(h_BSH)

    def forward(self, h_BSH: Tensor) -> Tensor:
        return checkpoint(self.inner, h_BSH, use_reentrant=False)


def test_probe_may_recompute_a_checkpointed_layer() -> None:
    model, batches = model_of(RecomputedLayer, aux=0.1), make_batches(1, 2)
    assert LocalJob(model, ONE).step(batches).difference(*plain_step(model, batches)) < 1e-12


def test_reentrant_checkpointing_is_refused() -> None:
    job = LocalJob(model_of(ReentrantLayer), ONE)
    message = refusal(lambda: job.run([[user_step(job.models[0], IDS)]]))
    assert message.startswith("layers.0 runs its experts without gradients") and "use_reentrant=False" in message


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_the_call_of_a_layer_is_refused(reentrant: bool) -> None:
    def step(model: TinyMoE) -> Tensor:
        h = model.embedding(IDS)
        for layer in model.layers:
            h = checkpoint(layer, h, use_reentrant=reentrant)
        return h.square().mean()

    message = refusal(lambda: run(model_of(), step))
    assert "at layers.0" in message
    assert "activation checkpointing belongs inside the layer's forward, with use_reentrant=False" in message


def test_step_sees_the_context_variables_of_its_caller_and_keeps_its_own() -> None:
    seen: list[str] = []

    def step(model: TinyMoE, name: str) -> Tensor:
        seen.append(variable.get())
        variable.set(name)
        loss = micro_batch_loss(model, IDS)
        seen.append(variable.get())
        return loss

    job = LocalJob(model_of(), ONE, "layer-major")
    variable.set("caller")
    job.run([[step_of(partial(step, job.models[0], name), 0.5) for name in ("first", "second")]])
    assert seen == ["caller", "caller", "first", "second"]
    assert variable.get() == "caller"


@pytest.mark.parametrize("order", ["layer-major", "af-pipe"])
def test_interleaved_micro_batches_collect_their_own_router_logits(order: str) -> None:
    model, collected = model_of(aux=0.1, layers=3), []
    batches = make_batches(1, 4)

    def step(own: TinyMoE, ids: Tensor) -> Tensor:
        out = own(ids)
        collected.append([logits.detach() for logits in out.router_logits])
        return out.aux_loss + out.logits.mean()

    job = LocalJob(model, ONE, order)
    job.run([[step_of(partial(step, job.models[0], ids), 0.25) for ids in batches[0]]])
    for ids, logits in zip(batches[0], collected, strict=True):
        torch.testing.assert_close(logits, list(model(ids).router_logits))
