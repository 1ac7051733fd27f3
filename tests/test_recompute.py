"""Activation recompute: the same gradients, no message sent twice, and never silently another choice of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, plain_step
from tiny import TinyMoE, TinyRouter, tiny
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.port import Port
from lightning_afd.model.recompute import recomputed
from lightning_afd.placement import Layout


def model_of() -> TinyMoE:
    return tiny(aux=0.1, shared_expert=True, dense_first=1, layers=4).double()


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("recompute_experts", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_recompute_gives_the_same_gradients(recompute: str, recompute_experts: bool, groups: int) -> None:
    model, batches = model_of(), make_batches(2, 3)
    want = plain_step(model, batches)
    layout = Layout(attention=2, ffn=2, groups=groups)
    job = LocalJob(model, layout, recompute=recompute, recompute_experts=recompute_experts)
    for _ in range(2):
        assert job.step(batches).difference(*want) < 1e-12


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("attention", 0), ("full", 1)])
def test_only_a_full_recompute_runs_the_ports_again(
    monkeypatch: pytest.MonkeyPatch, recompute: str, again: int
) -> None:
    calls: list[bool] = []
    run = Port._run

    def counting(self: Port, *args: Any) -> Tensor:
        calls.append(self._cut.host.in_backward)
        return run(self, *args)

    model = tiny(layers=2, shared_expert=True).double()  # shared experts come behind the port: it is reached again
    job = LocalJob(model, Layout(attention=1, ffn=1), recompute=recompute)
    batches = make_batches(1, 2)
    job.step(batches)
    monkeypatch.setattr(Port, "_run", counting)
    sent = sum(job.network.sent_bytes.values())
    job.step(batches)
    first = sum(job.network.sent_bytes.values()) - sent
    assert (calls.count(False), calls.count(True)) == (4, 4 * again)
    job.step(batches)
    assert sum(job.network.sent_bytes.values()) - sent == 2 * first


def test_experts_keep_only_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    forward = ExpertShard.forward

    def watching(self: ExpertShard, *args: Any, **kwargs: Any) -> Any:
        y_TH, saved = forward(self, *args, **kwargs)
        kept.append(saved._payload.z_RZ is not None)
        return y_TH, saved

    monkeypatch.setattr(ExpertShard, "forward", watching)
    for recompute_experts in (False, True):
        kept.clear()
        job = LocalJob(tiny(layers=2), Layout(attention=1, ffn=1), recompute_experts=recompute_experts)
        job.step(make_batches(1, 1))
        assert kept == [not recompute_experts] * 2


def test_what_top_k_chose_is_replayed() -> None:
    """Rounding or ties could choose other experts in the recompute."""
    chosen: list[Tensor] = []

    def route(x: Tensor) -> Tensor:
        values, indices = (x if not chosen else -x).topk(2)
        chosen.append(indices)
        return values.square().sum()

    x = torch.arange(6.0, requires_grad=True)
    recomputed(route)(x).backward()
    assert [indices.tolist() for indices in chosen] == [[5, 4], [5, 4]]


@pytest.mark.parametrize("shared_expert", [False, True])
def test_another_choice_in_the_recompute_is_harmless_or_an_error(shared_expert: bool) -> None:
    """Case D11: a hook behind the router moves token 0 to another expert when it sees an input for the second time.

    What was dispatched in the forward counts; where the recompute reaches the experts, the difference is noticed.
    """
    seen: list[Tensor] = []

    def moves(_router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, w, idx = output
        if any(torch.equal(args[0], old) for old in seen):
            idx = idx.clone()
            idx[0] = (idx[0] + 1) % 4
        seen.append(args[0].detach().clone())
        return logits, w, idx

    model, batches = tiny(layers=2, shared_expert=shared_expert).double(), make_batches(1, 1)
    want = plain_step(model, batches)
    job = LocalJob(model, Layout(attention=1, ffn=1), recompute="full")
    for router in (module for module in job.models[0].modules() if isinstance(module, TinyRouter)):
        router.register_forward_hook(moves)
    if shared_expert:
        with pytest.raises(CheckpointError, match="chose other experts in its recompute"):
            job.step(batches)
    else:
        assert job.step(batches).difference(*want) < 1e-12
