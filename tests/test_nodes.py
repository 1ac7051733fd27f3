"""One copy of a token per node of F ranks, spread there: gradients of the plain loop, and fewer bytes between nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from local_job import Batches, LocalJob, make_batches, micro_batch_loss, plain_step, user_step, worst_difference
from recorded import recorded
from tiny import TinyMoE, TinyRouter, tiny
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.model import routing
from lightning_afd.model.routing import NodeRouter, Route
from lightning_afd.node_relay import NodeRelay
from lightning_afd.peers import Peers
from lightning_afd.placement import Layout, Worker
from lightning_afd.recording import chrome_trace, load, save
from lightning_afd.report.page import write_report
from lightning_afd.report.predict import predict
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Timeline
from lightning_afd.transport.wire import Section, message_bytes
from lightning_afd.waits import usage_of, waits_of

ONE_NODE = Layout(attention=2, ffn=2, node_ranks=2)
TWO_NODES = Layout(attention=2, ffn=4, node_ranks=2)
UNEVEN = Layout(attention=3, ffn=4, node_ranks=2)
"""Nodes of one, two and one F ranks."""
LAYOUTS = [
    ONE_NODE,
    UNEVEN,
    Layout(attention=1, ffn=3, node_ranks=4),  # fewer A ranks than relays
    Layout(attention=2, ffn=2, groups=2, node_ranks=2),
    Layout(attention=1, ffn=2, groups=2, neighbours="groups", node_ranks=3),
    Layout(attention=2, ffn=2, groups=(1, 2), node_ranks=2),
    Layout(attention=3, ffn=2, head="ffn", node_ranks=5),
]
TOLERANCE = 1e-12
F0 = Worker("F", 0)


def model_of(**sizes: Any) -> TinyMoE:
    """A small float64 model."""
    return tiny(**{"layers": 2, "hidden": 8, "expert_width": 4, "experts": 8, **sizes}).double()


def difference(model: nn.Module, layout: Layout, batches: Batches, order: str = "af-pipe", **choices: Any) -> float:
    return LocalJob(model, layout, order, **choices).step(batches).difference(*plain_step(model, batches))


@pytest.mark.parametrize(
    ("layout", "order"),
    [*((TWO_NODES, order) for order in ORDERS), *zip(LAYOUTS, cycle(ORDERS), strict=False)],
    ids=str,
)
def test_step_equals_the_plain_loop(layout: Layout, order: str) -> None:
    model, batches = model_of(aux=0.05), make_batches(layout.attention, 3)
    job, want = LocalJob(model, layout, order), plain_step(model, batches)
    for _ in range(2):  # into buffers that grow, then into those that have been posted
        assert job.step(batches).difference(*want) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "sizes", "choices"),
    [
        (TWO_NODES, {"top_k": 1, "aux": 0.1}, {}),
        (TWO_NODES, {"top_k": 8}, {}),
        (UNEVEN, {"experts": 5, "top_k": 3}, {"recompute": "full", "recompute_experts": True}),
        (UNEVEN, {"experts": 7, "shared_expert": True}, {"recompute": "attention"}),
        (TWO_NODES, {"experts": 6, "shared_expert": True}, {"shared_experts": "ffn"}),
        (UNEVEN, {"shared_expert": True, "top_k": 3}, {"shared_experts": "ffn", "recompute_experts": True}),
        (ONE_NODE, {}, {"dedup": False}),
    ],
)
def test_variants_equal_the_plain_loop(layout: Layout, sizes: dict[str, Any], choices: dict[str, Any]) -> None:
    assert difference(model_of(**sizes), layout, make_batches(layout.attention, 2), **choices) < TOLERANCE


@pytest.mark.parametrize("micro_batches", [[0, 3], [2, 0], [1, 3]])
def test_ranks_may_bring_nothing(micro_batches: list[int]) -> None:
    """Also to a relay of their own."""
    batches = [mine[:count] for mine, count in zip(make_batches(2, 3), micro_batches, strict=True)]
    assert difference(model_of(), TWO_NODES, batches) < TOLERANCE


def to_experts_0_and_1(_router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits_TE, w_TK, idx_TK = output
    return logits_TE, w_TK, torch.arange(2).expand_as(idx_TK)


def test_ranks_and_nodes_may_get_no_row() -> None:
    model, batches = model_of(), make_batches(2, 2)
    for router in (module for module in model.modules() if isinstance(module, TinyRouter)):
        router.register_forward_hook(to_experts_0_and_1)
    job = LocalJob(model, TWO_NODES)
    assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE
    received = [engine.experts.received_rows for engine in job.engines if engine.experts]
    assert received[0] > 0 and received[1:] == [0, 0, 0]


def test_evaluation_equals_the_plain_model() -> None:
    """Before, between and behind training steps."""
    model, batches = model_of(), make_batches(2, 1)
    job = LocalJob(model, TWO_NODES)
    for _ in range(2):
        with torch.no_grad():
            results = job.run([[user_step(job.models[a], batches[a][0])] for a in (0, 1)], training=False)
            expected = [micro_batch_loss(model, ids).item() for (ids,) in batches]
        assert [mine[0].item() for mine in results] == pytest.approx(expected, rel=1e-12)
        assert job.step(batches).difference(*plain_step(model, batches)) < TOLERANCE


def test_rows_in_bfloat16_are_added_in_float32() -> None:
    """A relay rounds its sums once more than F ranks do: to as many digits as rows on the wire have."""
    model = model_of(top_k=4).to(torch.bfloat16)
    batches = make_batches(2, 2)
    exact = plain_step(model.double(), batches)
    model.to(torch.bfloat16)
    apart, spread = (
        LocalJob(model, replace(TWO_NODES, node_ranks=ranks)).step(batches) for ranks in (1, TWO_NODES.node_ranks)
    )
    errors = [
        worst_difference({name: grad.double() for name, grad in outcome.replicas[0].items()}, exact[1], noise=0.1)
        for outcome in (apart, spread)
    ]
    assert errors[1] < 1.5 * errors[0] < 0.2


# -- what travels -------------------------------------------------------------------------------------------------


def dispatched(job: LocalJob, channel: str) -> Counter[tuple[int, int]]:
    """Bytes of the last step on a channel, by sender and receiver."""
    sent = (
        (rank, receiver, nbytes)
        for rank, engine in enumerate(job.engines)
        for (name, receiver), (_, nbytes) in engine.link.sent.items()
        if name == channel
    )
    return Counter({(rank, receiver): nbytes for rank, receiver, nbytes in sent})


@pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES, UNEVEN], ids=repr)
def test_one_copy_per_node_travels(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of every dispatch between every pair of ranks, from the experts of each token alone."""
    seen: list[tuple[Any, Tensor]] = []
    begin = routing.Router.begin
    monkeypatch.setattr(routing.Router, "begin", lambda own, idx: (seen.append((own, idx)), begin(own, idx))[1])
    model, batches = model_of(layers=1, top_k=3), make_batches(layout.attention, 2)
    job = LocalJob(model, layout)
    job.step(batches)
    seen.clear()
    job.step(batches)
    expert_to_rank = torch.tensor(ExpertMap.contiguous(8, layout.ffn).expert_to_rank)
    first, expected = layout.attention, Counter[tuple[int, int]]()
    for replica in range(layout.attention):
        router = job.engines[replica].attention._routers[0]
        relays = {(first + rank) // layout.node_ranks: first + rank for rank in range(layout.ffn)}
        for node in relays:
            ranks = [first + rank for rank in range(layout.ffn) if (first + rank) // layout.node_ranks == node]
            relays[node] = ranks[replica % len(ranks)]
        for idx_TK in (idx for owner, idx in seen if owner is router):
            node_TK = (expert_to_rank[idx_TK] + first) // layout.node_ranks
            for node, relay in relays.items():
                rows = int((node_TK == node).any(1).sum())
                kinds = ((8, torch.float64), (3, torch.float64), (3, torch.int32))
                sections = [Section(rows, width, dtype) for width, dtype in kinds]
                expected[replica, relay] += message_bytes(sections)
    assert dispatched(job, "Df") == expected


def test_fewer_bytes_between_nodes_in_every_direction() -> None:
    """With all experts chosen, each token visits every F rank: half as many copies where two share a node."""
    model, batches = model_of(layers=1, hidden=64, top_k=8), make_batches(2, 2, longer=20)
    between = []
    for ranks in (1, 2):
        job = LocalJob(model, replace(TWO_NODES, node_ranks=ranks))
        job.step(batches)
        job.step(batches)
        own = [dispatched(job, channel) for channel in ("Df", "Cf", "Db", "Cb")]
        assert all(sender // 2 != receiver // 2 for sent in own for sender, receiver in sent)
        between.append([sum(sent.values()) for sent in own])
        inside = [pair for channel in ("Xf", "Yf", "Xb", "Yb") for pair in dispatched(job, channel)]
        assert bool(inside) == (ranks == 2) and all(one // 2 == other // 2 for one, other in inside)
    assert all(new == pytest.approx(old / 2, rel=0.05) for old, new in zip(*between, strict=True))


def test_a_recorded_step_says_what_exchanges_wait_for(tmp_path: Path) -> None:
    """For F ranks, and for the network; an arrow leads to them from each rank of the node."""
    model, batches = model_of(), make_batches(2, 2)
    job = LocalJob(model, TWO_NODES)
    job.step(batches)
    shape = job.engines[0].plan.shape(2)
    timeline = Timeline(TWO_NODES, tuple(span for engine in job.engines for span in engine.runtime.spans))
    waits = waits_of(timeline, shape)
    kinds = Counter(wait.span.action.op + wait.span.action.phase for wait in waits)
    per_kind = 4 * shape.layers * shape.micro_batches  # 4 F ranks
    assert [kinds[kind] for kind in ("Xf", "Xb", "Yf", "Yb")] == [per_kind] * 4
    assert {wait.sender for wait in waits if wait.span.action.is_exchange} == {"F"}
    for usage in usage_of(timeline, waits).values():
        assert usage.step == pytest.approx(timeline.seconds)
    maps, tokens = (ExpertMap.contiguous(8, 4),) * 2, ((1,) * 8,) * 2
    recording = recorded(timeline, shape, expert_maps=maps, tokens_per_expert=tokens)
    assert load(save(recording, tmp_path / "trace")).schedule() == job.engines[0].programs(2, training=True).schedule
    predicted = predict(recording, waits).timeline
    assert {str(span.action) for span in predicted.spans} == {str(span.action) for span in timeline.spans}
    messages = [event for event in chrome_trace(recording)["traceEvents"] if event.get("cat") == "message"]
    arrows = [event for event in messages if event["name"] == "X0f0"]
    assert len(arrows) == 2 * (2 * 2 + 2 * 2)  # both ends of those among two ranks of two nodes
    assert "spread inside nodes forward (Xf)" in write_report(tmp_path).read_text()


def test_ranks_of_a_node_take_turns_as_relays() -> None:
    shape = Shape(layers=1, micro_batches=1, spreads=True)
    by_replica = [list(Peers(UNEVEN, shape, rank).expert_ranks(0)) for rank in range(3)]
    assert by_replica == [[3, 4, 6], [3, 5, 6], [3, 4, 6]]
    assert [list(Peers(UNEVEN, shape, rank).attention_ranks(0)) for rank in range(3, 7)] == [
        [0, 1, 2],
        [0, 2],
        [1],
        [0, 1, 2],
    ]
    assert [Peers(UNEVEN, shape, rank).siblings for rank in range(3, 7)] == [(3,), (4, 5), (4, 5), (6,)]


# -- what is refused, and that a fault is seen ---------------------------------------------------------------------


def test_comparison_sees_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = model_of(), make_batches(2, 2)
    gather, sums = NodeRelay.gather, Route.sum_weights

    def broken(target: Any, name: str, value: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return difference(model, TWO_NODES, batches)

    def without_last_a_rank(relay: NodeRelay, action: Any) -> None:
        gather(relay, action)
        for tensors in relay._item(action).out[-1:]:
            for tensor in tensors:
                tensor.zero_()

    def all_to_the_first(router: NodeRouter, idx_TK: Tensor) -> Route:
        return routing.Router.route(router, idx_TK.clamp_min(0))

    assert broken(NodeRelay, "gather", without_last_a_rank) > 1e-3
    assert broken(NodeRouter, "route", all_to_the_first) > 1e-3
    assert broken(Route, "sum_weights", lambda *args: sums(*args).flip(0)) > 1e-3


def test_maps_of_nodes_and_inside_of_them() -> None:
    """Local ids of a node count its experts in the order of their global ids, as the map inside of it does."""
    own = ExpertMap((2, 0, 1, 2, 1, 0, 2))
    nodes = ((0,), (1, 2))
    assert own.joined(nodes).expert_to_rank == (1, 0, 1, 1, 1, 0, 1)
    inside = own.within(nodes[1])
    assert inside.expert_to_rank == (1, 0, 1, 0, 1)
    for node, expert in ((node, e) for node in (1,) for e in range(7) if own.expert_to_rank[e] in nodes[node]):
        position = own.joined(nodes).local_ids()[expert]
        assert nodes[node][inside.expert_to_rank[position]] == own.expert_to_rank[expert]
        assert inside.local_ids()[position] == own.local_ids()[expert]


def test_nodes_of_a_layout() -> None:
    assert UNEVEN.nodes[F0] == ((0,), (1, 2), (3,))
    assert UNEVEN.spreads and not replace(UNEVEN, node_ranks=1).spreads
    assert not Layout(attention=1, ffn=2, neighbours="groups", node_ranks=2).spreads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_ranks": 0}, "node_ranks=0: at least 1"),
        ({"collocated": True, "node_ranks": 2}, "cannot have node_ranks=2"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Layout(attention=2, ffn=2, **options)
