"""The same step over real process groups: equal to the plain loop, nothing left behind, as many bytes as in process."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from local_job import (
    Gradients,
    LocalJob,
    gradients_of,
    join_gradients,
    labels,
    make_batches,
    plain_step,
    user_step,
    worst_difference,
)
from pool import RankErrors, RankPool
from tiny import TinyMoE, tiny

from lightning_afd.engine import Engine
from lightning_afd.gradients import sum_over_replicas
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups

CPU = torch.device("cpu")


def model_of() -> TinyMoE:
    return tiny(layers=2, hidden=8, expert_width=4, experts=5, aux=0.05).double()


class Rank(NamedTuple):
    """What one rank knows after its steps."""

    loss: float
    grads: Gradients
    sent_bytes: int
    outstanding: int


def connect(layout: Layout) -> tuple[int, ProcessGroups, P2PTransport]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = ProcessGroups(layout, rank, timedelta(seconds=60))
    groups.warm(CPU)
    return rank, groups, P2PTransport(groups, CPU)


def train(layout: Layout, order: str, steps: int) -> Rank:
    """Equal steps on the rank of this process."""
    rank, groups, transport = connect(layout)
    model, batches = model_of(), make_batches(layout.attention, 3)
    plan, layers = make_plan(model, layout, order=order, micro_batches=3)
    engine = Engine(plan, rank, transport, transport)
    engine.place(model, layers)
    engine.connect(model, layers, CPU)
    total = sum(labels(ids) for replica in batches for ids in replica)
    mine = batches[rank] if engine.is_attention else []
    work = [user_step(model, ids, labels(ids) / total) for ids in mine]
    loss = 0.0
    for _ in range(steps):
        model.zero_grad()
        results = engine.run(work, engine.agree(len(work), 0.0).micro_batches, training=True)
        loss = sum(result.item() * step.weight for result, step in zip(results, work, strict=True))
        if engine.is_attention:
            sum_over_replicas([p for p in model.parameters() if p.device.type != "meta"], transport)
    answer = Rank(loss, gradients_of(model), transport.sent_bytes, sum(map(len, transport._sends.values())))
    groups.destroy()
    return answer


@pytest.mark.parametrize(
    ("attention", "ffn", "order"), [(2, 2, "af-pipe"), (1, 2, "layer-major"), (3, 1, "af-pipe"), (1, 1, "sequential")]
)
def test_step_over_process_groups_equals_the_plain_loop(pool: RankPool, attention: int, ffn: int, order: str) -> None:
    layout = Layout(attention=attention, ffn=ffn)
    ranks = pool.run(train, layout.world, layout, order, 2)
    batches = make_batches(attention, 3)
    loss, grads = plain_step(model_of(), batches)
    assert sum(rank.loss for rank in ranks) == pytest.approx(loss, rel=1e-12)
    for replica in range(attention):
        joined = join_gradients(model_of(), layout, [rank.grads for rank in ranks], replica)
        assert worst_difference(joined, grads) < 1e-12
    assert [rank.outstanding for rank in ranks] == [0] * layout.world

    local = LocalJob(model_of(), layout, order)
    for _ in range(2):
        local.step(batches)
    sent = [sum(n for route, n in local.network.sent_bytes.items() if route[1] == r) for r in range(layout.world)]
    assert [rank.sent_bytes for rank in ranks] == sent


def groups_in_order(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """The members of each group in the order of its creation on this rank, and in that of its first collective."""
    made: list[list[int]] = []
    warmed: list[list[int]] = []
    new_group, all_reduce = dist.new_group, dist.all_reduce

    def making(ranks: list[int], **options: Any) -> Any:
        made.append(list(ranks))
        return new_group(ranks, **options)

    def reducing(tensor: torch.Tensor, group: Any) -> Any:
        warmed.append(dist.get_process_group_ranks(group))
        return all_reduce(tensor, group=group)

    dist.new_group, dist.all_reduce = making, reducing
    try:
        _, groups, _ = connect(layout)
    finally:
        dist.new_group, dist.all_reduce = new_group, all_reduce
    assert len({id(group) for group in [*groups.channels.values(), groups.control, dist.group.WORLD]}) == 2 + len(
        groups.channels
    )
    return made, warmed


def test_groups_are_made_and_warmed_in_one_order(pool: RankPool) -> None:
    everyone, attention, ffn = [0, 1, 2, 3], [0, 1, 2], [3]
    answers = pool.run(groups_in_order, 4, Layout(attention=3, ffn=1))
    for rank, (made, warmed) in enumerate(answers):
        assert made == [everyone] * 5 + [attention, attention, ffn]  # the second one for chunks of gradients
        assert warmed == [everyone] * 5 + ([attention, attention] if rank < 3 else [ffn])


def objects() -> object:
    """What each of two ranks sends the other."""
    rank, _, transport = connect(Layout(attention=1, ffn=1))
    if rank == 0:
        transport.send_object({"rows": torch.arange(3)}, 1)
        return transport.receive_object(1)
    received = transport.receive_object(0)
    transport.send_object("got it", 0)
    return received


def test_objects_of_two_ranks(pool: RankPool) -> None:
    answer, received = pool.run(objects, 2)
    assert answer == "got it" and received["rows"].tolist() == [0, 1, 2]


def test_ranks_with_tails_have_a_group_of_their_own(pool: RankPool) -> None:
    made, warmed = zip(*pool.run(groups_in_order, 4, Layout(attention=1, ffn=3, head="ffn")), strict=True)
    assert all(groups == [[0, 1, 2, 3]] * 9 + [[0], [1], [2, 3]] for groups in made)
    assert [groups[-1] for groups in warmed] == [[0], [1], [2, 3], [2, 3]]


def talk() -> tuple[int, int, list[Any]]:
    """Sends of several micro-batches, released one by one; collectives of the control group."""
    rank, _, transport = connect(Layout(attention=1, ffn=1))
    peer, channel = 1 - rank, ("Df", "Cf")[rank]
    answers = ("Cf", "Df")[rank]
    posted = [transport.post(answers, peer, tag, 16) for tag in (1, 0)]  # type: ignore[arg-type]
    for tag in (0, 1):
        transport.send(channel, peer, tag, torch.full((8,), 10 * rank + tag, dtype=torch.uint8))  # type: ignore[arg-type]
    got = [incoming.wait()[:8].unique().item() for incoming in posted]
    transport.release(1)
    left = sorted(micro_batch for micro_batch, _ in transport._sends)
    transport.release()
    told = transport.broadcast_object(("plan", rank), 1)
    rows = transport.all_gather([rank + 0.5, 2.0])
    tensor = torch.tensor([rank + 1.0])
    transport.sum_over_replicas(tensor)
    return transport.sent_bytes, len(transport._sends), [got, left, told, rows, tensor.item()]


def test_messages_and_agreements_of_two_ranks(pool: RankPool) -> None:
    for rank, (sent, left, answers) in enumerate(pool.run(talk, 2)):
        assert (sent, left) == (16, 0)
        peer = 1 - rank
        assert answers[:4] == [[10 * peer + 1, 10 * peer], [0], ("plan", 1), [[0.5, 2.0], [1.5, 2.0]]]
        assert answers[4] == rank + 1.0  # each is alone in its worker group


def fail_in_user_code(layout: Layout) -> None:
    """A step that raises on A rank 0 in micro-batch 1."""
    rank, _, transport = connect(layout)
    model = model_of()
    plan, layers = make_plan(model, layout, order="af-pipe", micro_batches=2)
    engine = Engine(plan, rank, transport, transport)
    engine.place(model, layers)
    engine.connect(model, layers, CPU)
    if engine.is_attention:
        model.layers[1].norm2.register_forward_hook(lambda module, args, out: 1 // (os.environ["RANK"] != "0"))
    ids = make_batches(layout.attention, 2)
    engine.run([user_step(model, m) for m in ids[rank]] if engine.is_attention else [], 2, training=True)


def test_failure_of_one_rank_is_the_users_exception_with_its_place(pool: RankPool) -> None:
    with pytest.raises(RankErrors) as failure:
        pool.run(fail_in_user_code, 2, Layout(attention=1, ffn=1), timeout=30)
    first = failure.value.errors[0]
    assert first.type_name == "ZeroDivisionError"
    assert "rank 0 (A0) failed in A1f0: layer 1, micro-batch 0" in first.traceback
    # Which dispatch it still waits for depends on what had arrived before the connection broke.
    assert "rank 1 (F0) failed in D" in failure.value.errors[1].traceback
