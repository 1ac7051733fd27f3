"""With attention and experts on the same ranks a step gives the loss and gradients of the plain loop, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from local_job import Batches, LocalJob, make_batches, micro_batch_loss, plain_step, user_step
from tiny import TinyMoE, tiny
from torch import Tensor

from lightning_afd import reduction
from lightning_afd.errors import PlanError, ProtocolError
from lightning_afd.ffn_rank import FFNRank
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.place import is_first_copy, owned_bytes
from lightning_afd.model.routing import Route
from lightning_afd.optimizer import measure_norm
from lightning_afd.placement import Layout
from lightning_afd.plan import Plan
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.together import TOGETHER_ORDERS
from lightning_afd.transport.base import Channel, tag_of
from lightning_afd.transport.link import Link, channel_of
from lightning_afd.transport.local import LocalNetwork

TOLERANCE = 1e-12
EVERYTHING: dict[str, Any] = {"aux": 0.05, "shared_expert": True, "dense_first": 1, "tied": True, "layers": 3}


def model_of(**sizes: Any) -> TinyMoE:
    """A small float64 model."""
    return tiny(**{**EVERYTHING, "hidden": 8, "expert_width": 4, **sizes}).double()


def difference(ranks: int, batches: Batches, order: str, model: TinyMoE | None = None, **choices: Any) -> float:
    """How far the second of two steps is from the plain loop."""
    model = model or model_of()
    job = LocalJob(model, Layout.together(ranks), order, **choices)
    job.step(batches)
    return job.step(batches).difference(*plain_step(model, batches))


@pytest.mark.parametrize("order", TOGETHER_ORDERS)
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "recompute"),
    [
        (1, 1, "none"),
        (1, 4, "full"),
        (2, 1, "attention"),
        (2, 2, "none"),
        (4, 1, "none"),
        (4, 2, "full"),
        (4, 4, "none"),
    ],
)
def test_a_step_equals_the_plain_loop(ranks: int, micro_batches: int, recompute: str, dedup: bool, order: str) -> None:
    choices = {"dedup": dedup, "recompute": recompute, "recompute_experts": recompute != "none"}
    assert difference(ranks, make_batches(ranks, micro_batches), order, **choices) < TOLERANCE


@pytest.mark.parametrize("order", TOGETHER_ORDERS)
def test_ranks_may_bring_less_or_nothing_that_counts(order: str) -> None:
    """Fewer micro-batches than others, and one without labels."""
    batches = [replica[:count] for replica, count in zip(make_batches(3, 4), [2, 3, 1], strict=True)]
    batches[2].append(torch.zeros(2, 1, dtype=torch.int64))
    assert difference(3, batches, order, model_of(experts=5)) < TOLERANCE


@pytest.mark.parametrize("dedup", [True, False])
def test_a_copy_per_expert_where_they_are_apart(dedup: bool) -> None:
    model, batches = model_of(top_k=3), make_batches(2, 2)
    for layout in (Layout(attention=2, ffn=3), Layout(attention=2, ffn=2, groups=2)):
        outcome = LocalJob(model, layout, dedup=dedup).step(batches)
        assert outcome.difference(*plain_step(model, batches)) < TOLERANCE


def test_dedup_sends_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of [H] that travel: without dedup one per expert."""

    def dispatched(dedup: bool) -> int:
        rows: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(FFNRank, "end", lambda rank: rows.append(rank.received_rows))
            LocalJob(model_of(top_k=4), Layout.together(2), "flowmoe", dedup=dedup).step(make_batches(2, 1))
        return sum(rows)

    assert dispatched(False) == 2 * dispatched(True)  # each token goes to 4 experts on both ranks


@pytest.mark.parametrize("order", TOGETHER_ORDERS)
def test_nothing_is_sent_to_oneself(order: str) -> None:
    job = LocalJob(model_of(), Layout.together(3), order)
    job.step(make_batches(3, 2))
    assert job.network.sent_bytes and all(sender != receiver for _, sender, receiver in job.network.sent_bytes)
    alone = LocalJob(model_of(), Layout.together(1), order)
    alone.step(make_batches(1, 2))
    assert not alone.network.sent_bytes and alone.engines[0].link.payload_bytes == 0


def test_sums_for_oneself_are_handed_over_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    kept: list[Tensor] = []
    forward, hand_over = ExpertShard.forward, Link.hand_over

    def watched(shard: ExpertShard, *args: Any, **options: Any) -> Any:
        result = forward(shard, *args, **options)
        made.append(result[0])
        return result

    def watching(link: Link, action: Any, tensors: list[Tensor]) -> None:
        kept.extend(tensors if str(action).startswith("C1f") else [])
        hand_over(link, action, tensors)

    monkeypatch.setattr(ExpertShard, "forward", watched)
    monkeypatch.setattr(Link, "hand_over", watching)
    LocalJob(model_of(), Layout.together(1), "flowmoe").step(make_batches(1, 2))
    assert [y_TH.data_ptr() for y_TH in kept] == [y_TH.data_ptr() for y_TH in made[2:]]


def test_a_receive_without_its_send_is_named() -> None:
    job = LocalJob(model_of(), Layout.together(1), "sequential")
    engine = job.engines[0]
    programs = engine.programs(1, training=True)
    attention, _, *rest = programs.by_worker[engine.worker]  # without A0:D0f0
    engine._programs[1, True] = replace(programs, by_worker={engine.worker: (attention, *rest)})
    with pytest.raises(ProtocolError, match="rank 0 waits for its own D0f0") as failure:
        job.step(make_batches(1, 1))
    assert failure.value.__notes__ == ["rank 0 (F0) failed in D0f0: layer 0, micro-batch 0"]


class Held:
    """Keeps a message of layer 0 back until rank 0 has done something."""

    def __init__(self, order: str, message: str, until: str) -> None:
        action = Action.parse(message)
        self.until, self.key, self.times = until, (channel_of(action), tag_of(0, action.micro_batch)), 0
        layout = Layout.together(2)
        self.job = LocalJob(model_of(), layout, order, network=LocalNetwork(layout, hold=self.hold))

    def hold(self, channel: Channel, tag: int) -> bool:
        held = (channel, tag) == self.key and self.until not in self.done()
        self.times += held
        return held

    def done(self) -> list[str]:
        return [str(span.action) for span in self.job.engines[0].runtime.spans]


@pytest.mark.parametrize(
    ("order", "message", "until"),
    [
        ("flowmoe", "D0f0", "A0f1"),  # attention of the next micro-batch runs while a dispatch travels
        ("flowmoe", "D0f1", "E0f0"),
        ("flowmoe", "C0f0", "E0f1"),  # experts of the next one while sums do
        ("flowmoe", "C0f1", "A1f0"),
        ("flowmoe", "C0b1", "A0b0"),
        ("experts-only", "D0f1", "E0f0"),
        ("experts-only", "C0f0", "E0f1"),
        ("experts-only", "C0b0", "E0b1"),
    ],
)
def test_what_an_order_hides(order: str, message: str, until: str) -> None:
    held, batches = Held(order, message, until), make_batches(2, 2)
    assert held.job.step(batches).difference(*plain_step(model_of(), batches)) < TOLERANCE
    assert held.done().index(message) > 0


@pytest.mark.parametrize(
    ("order", "message", "until"),
    [
        ("sequential", "D0f0", "A0f1"),
        ("sequential", "C0f0", "E0f1"),
        ("sequential", "C0b0", "A0f1"),
        ("experts-only", "C0f1", "A1f0"),
        ("experts-only", "C0b1", "A0b0"),
    ],
)
def test_what_it_cannot_hide(order: str, message: str, until: str) -> None:
    held = Held(order, message, until)
    with pytest.raises(ProtocolError, match=f"deadlock: rank 0 waits for {message} from rank 1"):
        held.job.step(make_batches(2, 2))
    assert held.times > 0 and held.done()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_equals_the_plain_model(context: Any) -> None:
    model, batches = model_of(), make_batches(2, 1)
    job = LocalJob(model, Layout.together(2), "flowmoe")
    for _ in range(2):
        with context():
            results = job.run([[user_step(job.models[a], batches[a][0])] for a in (0, 1)], training=False)
            expected = [micro_batch_loss(model, ids).item() for (ids,) in batches]
        assert [mine[0].item() for mine in results] == pytest.approx(expected, rel=1e-12)
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


def test_the_norm_counts_everything_once() -> None:
    model, batches = model_of(experts=5), make_batches(2, 2)
    job = LocalJob(model, Layout.together(2), "flowmoe")
    job.step(batches)
    _, grads = plain_step(model, batches)

    def norm(rank: int) -> float:
        layout, engine = job.layout, job.engines[rank]
        own = list(job.models[rank].parameters())
        return measure_norm(own, engine.collectives, counts=lambda p: is_first_copy(p, layout, rank)).value

    expected = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt().item()
    assert job.network.run([lambda: norm(0), lambda: norm(1)]) == pytest.approx([expected] * 2, rel=1e-12)


def test_a_rank_holds_everything_dense_and_its_share_of_the_experts() -> None:
    model = model_of(experts=5)
    held = [owned_bytes(own) for own in LocalJob(model, Layout.together(2), "flowmoe").models]
    experts = sum(p.numel() * 8 for name, p in model.named_parameters() if ".experts." in name)
    dense = owned_bytes(model) - experts
    assert held == [dense + experts * 3 // 5, dense + experts * 2 // 5]


def without_own_rows(rank: FFNRank, *args: Any) -> None:
    for tensor in args[1].out[rank._link.rank]:
        tensor.zero_()
    ANSWER(rank, *args)


ANSWER, SUM = FFNRank._answer, Route.sum_weights


def test_comparison_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Any, name: str, value: Any, **choices: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return difference(2, make_batches(2, 2), "flowmoe", **choices)

    assert broken(FFNRank, "_answer", without_own_rows) > 1e-3
    assert broken(reduction, "sum_over_replicas", lambda *args: None) > 1e-3
    assert broken(Route, "sum_weights", lambda *args: SUM(*args).flip(1), dedup=False) > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "af-pipe"}, "order='af-pipe' on 4 collocated: choose one of sequential, experts-only, flowmoe"),
        ({"shared_experts": "ffn"}, "shared_experts='ffn' on a collocated layout"),
        ({"layout": Layout.together(5)}, "5 collocated ranks for 4 experts per layer: use 4 ranks at most"),
        ({"layout": Layout(attention=2, ffn=2)}, f"order='flowmoe' on 2A . 2F: choose one of {', '.join(ORDERS)}"),
        (
            {"layout": Layout(attention=1, ffn=2), "order": "af-pipe", "shared_experts": "ffn", "dedup": False},
            "dedup=False with shared_experts='ffn'",
        ),
    ],
)
def test_plan_is_refused_with_its_numbers(change: dict[str, Any], message: str) -> None:
    sound: dict[str, Any] = {"layout": Layout.together(4), "layers": 2, "experts": (8, 4), "order": "flowmoe"}
    Plan(**sound, micro_batches=4).check()
    with pytest.raises(PlanError, match=message):
        Plan(**{**sound, "micro_batches": 4, **change}).check()
