"""A step on any layout, in any order, gives the loss and the gradients of the plain loop, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from local_job import Batches, Gradients, LocalJob, make_batches, micro_batch_loss, plain_step, user_step
from tiny import TinyMoE, TinyRouter, tiny
from torch import Tensor, nn

from lightning_afd import reduction
from lightning_afd.engine import Engine
from lightning_afd.errors import PlanError
from lightning_afd.ffn_rank import FFNRank
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.place import owned_bytes
from lightning_afd.placement import Layout
from lightning_afd.plan import Plan
from lightning_afd.schedule.orders import ORDERS

LAYOUTS = [(1, 1), (2, 2), (1, 2), (3, 1)]
TOLERANCE = 1e-12
SMALL: dict[str, Any] = {"layers": 2, "hidden": 8, "expert_width": 4}
EVERYTHING: dict[str, Any] = {"aux": 0.05, "shared_expert": True, "dense_first": 1, "tied": True, "layers": 3}


def model_of(**sizes: Any) -> TinyMoE:
    """A small float64 model."""
    return tiny(**{**SMALL, **sizes}).double()


@cache
def plain(replicas: int, micro_batches: int) -> tuple[float, Gradients]:
    """The plain loop of the default model."""
    return plain_step(model_of(), make_batches(replicas, micro_batches))


def difference(model: nn.Module, layout: Layout, order: str, batches: Batches) -> float:
    """How far one step is from the plain loop."""
    return LocalJob(model, layout, order).step(batches).difference(*plain_step(model, batches))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize(("attention", "ffn"), LAYOUTS)
def test_step_equals_the_plain_loop(attention: int, ffn: int, micro_batches: int, order: str) -> None:
    job = LocalJob(model_of(), Layout(attention=attention, ffn=ffn), order)
    outcome = job.step(make_batches(attention, micro_batches))
    assert outcome.difference(*plain(attention, micro_batches)) < TOLERANCE


@pytest.mark.parametrize(
    ("attention", "ffn", "order", "sizes"),
    [
        (1, 1, "layer-major", EVERYTHING),
        (2, 2, "af-pipe", EVERYTHING),
        (1, 3, "sequential", {**EVERYTHING, "dense_first": 2}),
        (2, 2, "af-pipe", {"experts": 5}),
        (1, 3, "layer-major", {"experts": 5, "top_k": 3}),
        (1, 2, "af-pipe", {"top_k": 1, "aux": 0.1}),  # with top-1 only the auxiliary loss moves this router
        (2, 2, "layer-major", {"top_k": 4}),
        (1, 2, "af-pipe", {"layers": 1}),
        (1, 2, "af-pipe", {"layers": 5}),
    ],
)
def test_variants_equal_the_plain_loop(attention: int, ffn: int, order: str, sizes: dict[str, Any]) -> None:
    layout = Layout(attention=attention, ffn=ffn)
    assert difference(model_of(**sizes), layout, order, make_batches(attention, 2)) < TOLERANCE


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("micro_batches", [[2, 3, 1], [1, 1, 4]])
def test_ranks_may_bring_fewer_micro_batches(micro_batches: list[int], order: str) -> None:
    batches = [replica[:count] for replica, count in zip(make_batches(3, 4), micro_batches, strict=True)]
    assert difference(model_of(), Layout(attention=3, ffn=2), order, batches) < TOLERANCE


@pytest.mark.parametrize("aux", [0.0, 0.1])
def test_masked_micro_batch_counts_as_left_out(aux: float) -> None:
    model, batches = model_of(aux=aux), make_batches(2, 3)
    masked = torch.zeros(2, 1, dtype=torch.int64)  # one position: no label, the loss is 0 / 0
    assert micro_batch_loss(model, masked).isnan()
    batches[0].insert(1, masked)
    batches[1].append(masked)
    assert difference(model, Layout(attention=2, ffn=2), "af-pipe", batches) < TOLERANCE


def test_step_without_any_label_gives_zero_gradients() -> None:
    job = LocalJob(model_of(), Layout(attention=1, ffn=2))
    masked = torch.zeros(2, 1, dtype=torch.int64)
    work = [[user_step(job.models[0], masked, 0.0)] * 2]
    assert job.run(work)[0][0].isnan()
    owned = [p.grad for model in job.models for p in model.parameters() if p.device.type != "meta"]
    assert all(grad is not None and not grad.any() for grad in owned)


def test_later_steps_equal_the_plain_loop_whatever_their_size() -> None:
    """The first step asks for buffers, the second uses them, the third asks for larger ones, the fourth for less."""
    job = LocalJob(model_of(), Layout(attention=2, ffn=2))
    for longer in (0, 0, 5, 1):
        batches = make_batches(2, 3, longer=longer)
        assert job.step(batches).difference(*plain_step(model_of(), batches)) < TOLERANCE


def test_number_of_micro_batches_may_change_between_steps() -> None:
    job = LocalJob(model_of(), Layout(attention=1, ffn=2))
    for micro_batches in (4, 1, 3):
        outcome = job.step(make_batches(1, micro_batches))
        assert outcome.difference(*plain(1, micro_batches)) < TOLERANCE


def to_experts_0_and_1(_router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits_TE, w_TK, idx_TK = output
    return logits_TE, w_TK, torch.arange(2).expand_as(idx_TK)


@pytest.mark.parametrize(("attention", "ffn", "groups"), [(1, 2, 1), (2, 4, 1), (1, 2, 2)])
def test_idle_ffn_rank_has_zero_gradients(attention: int, ffn: int, groups: int) -> None:
    model, batches = model_of(), make_batches(attention, 2)
    for router in (module for module in model.modules() if isinstance(module, TinyRouter)):
        router.register_forward_hook(to_experts_0_and_1)
    job = LocalJob(model, Layout(attention=attention, ffn=ffn, groups=groups))
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE
    idle = [p.grad for p in job.models[-1].parameters() if p.device.type != "meta"]
    assert len(idle) == 4 // groups and all(grad is not None and not grad.any() for grad in idle)
    received = [engine.experts.received_rows for engine in job.engines if engine.experts]
    assert received[0] > 0 and received[-1] == 0


@pytest.mark.parametrize("frozen", ["embedding", "layers.0", "", "experts"])
def test_frozen_parameters_get_no_gradient(frozen: str) -> None:
    """Frozen are the embedding, all of layer 0, everything but the experts, or the experts."""
    model, batches = model_of(aux=0.0), make_batches(1, 2)
    for name, parameter in model.named_parameters():
        inside = ".experts." in name
        parameter.requires_grad_(not (inside if frozen == "experts" else name.startswith(frozen) and not inside))
    assert difference(model, Layout(attention=1, ffn=2), "af-pipe", batches) < TOLERANCE


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_equals_the_plain_model(context: Any) -> None:
    """Also as the very first call, and in the middle of training."""
    model, batches = model_of(**EVERYTHING), make_batches(2, 1)
    job = LocalJob(model, Layout(attention=2, ffn=2))
    for _ in range(2):
        with context():
            results = job.run([[user_step(job.models[a], batches[a][0])] for a in (0, 1)], training=False)
            expected = [micro_batch_loss(model, ids) for (ids,) in batches]
        assert [mine[0].item() for mine in results] == pytest.approx([loss.item() for loss in expected], rel=1e-12)
        assert not any(mine[0].requires_grad for mine in results)
        assert all(p.grad is None for own in job.models for p in own.parameters())
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


def without_dw(self: ExpertShard, *args: Any) -> Any:
    dx_TH, dw_TK, pending = BACKWARD(self, *args)
    return dx_TH, torch.zeros_like(dw_TK), pending


def without_rows_of_the_last_rank(self: FFNRank, *args: Any) -> None:
    if self._link.rank == 3:
        for tensors in args[1].out:
            for tensor in tensors:
                tensor.zero_()
    ANSWER(self, *args)


BACKWARD, ANSWER = ExpertShard.backward, FFNRank._answer


def test_comparison_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = model_of(), make_batches(2, 2)
    layout = Layout(attention=2, ffn=2)

    def broken(target: Any, name: str, value: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return LocalJob(model, layout).step(batches).difference(*plain(2, 2))

    assert broken(ExpertShard, "backward", without_dw) > 1e-3
    assert broken(FFNRank, "_answer", without_rows_of_the_last_rank) > 1e-3
    assert broken(reduction, "sum_over_replicas", lambda *args: None) > 1e-3
    assert broken(ExpertShard, "weight_gradient", lambda shard, pending: shard.zero_missing_gradients()) == 1.0


def test_comparison_sees_wrong_weights() -> None:
    batches = make_batches(2, 2)
    job = LocalJob(model_of(), Layout(attention=2, ffn=2))
    results = job.run([[user_step(job.models[a], ids, 0.25) for ids in batches[a]] for a in (0, 1)])
    loss = sum(result.item() * 0.25 for mine in results for result in mine)
    assert abs(loss - plain(2, 2)[0]) > 1e-3
    embeddings = [job.models[a].embedding.weight.grad for a in (0, 1)]
    assert (sum(embeddings) - plain(2, 2)[1]["embedding.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("sizes", [{}, {"tied": True, "shared_expert": True, "experts": 5}])
def test_parameters_live_on_one_rank_of_each_kind(sizes: dict[str, Any]) -> None:
    model = model_of(**sizes)
    job = LocalJob(model, Layout(attention=2, ffn=3))
    held = [owned_bytes(own) for own in job.models]
    experts = sum(p.numel() * 8 for name, p in model.named_parameters() if ".experts." in name)
    assert held[:2] == [owned_bytes(model) - experts] * 2
    assert sum(held[2:]) == experts and all(held[2:])
    for rank, own in enumerate(job.models):
        inside = [".experts." in name for name, p in own.named_parameters() if p.device.type != "meta"]
        assert not any(inside) if rank < 2 else all(inside)
        assert [name for name, _ in own.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batches": 4097}, "1 to 4096"),
        ({"capacity": "half"}, "'counted' or 'full'"),
        ({"capacity": "full", "dedup": False}, "use dedup=True"),
        ({"layout": Layout(attention=1, ffn=5)}, "ffn=5 F ranks for 4 experts"),
    ],
)
def test_plan_is_refused_with_its_numbers(change: dict[str, Any], message: str) -> None:
    sound: dict[str, Any] = {"layout": Layout(attention=1, ffn=4), "layers": 2, "experts": (8, 4), "order": "af-pipe"}
    Plan(**sound, micro_batches=4).check()
    with pytest.raises(PlanError, match=message):
        Plan(**{**sound, "micro_batches": 4, **change}).check()


def test_agreement_is_the_most_micro_batches_and_the_sum_of_weights() -> None:
    job = LocalJob(model_of(), Layout(attention=2, ffn=1))

    def agree(rank: int) -> Any:
        return job.engines[rank].agree(*[(1, 7.0), (3, 0.5), (0, 0.0)][rank])

    agreements = job.network.run([lambda rank=rank: agree(rank) for rank in range(3)])
    assert [(a.micro_batches, a.total) for a in agreements] == [(3, 7.5)] * 3


def test_tokens_are_counted_once_and_waiting_is_a_share() -> None:
    job = LocalJob(model_of(layers=3), Layout(attention=2, ffn=2))
    batches = make_batches(2, 3)
    job.step(batches)
    assert [engine.tokens for engine in job.engines] == [*(sum(m.numel() for m in mine) for mine in batches), 0, 0]
    assert all(0 < engine.exposed() < 1 for engine in job.engines)


def test_disconnect_gives_the_layers_back() -> None:
    job = LocalJob(model_of(), Layout(attention=1, ffn=1))
    attention: Engine = job.engines[0]
    assert "forward" in vars(job.models[0].layers[0])
    attention.disconnect()
    assert not any("forward" in vars(module) or module._forward_hooks for module in job.models[0].layers.modules())
