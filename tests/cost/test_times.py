"""Seconds and bytes of actions, against closed formulas and published counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from lightning_afd.cost.config import model_shape
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices, Job
from lightning_afd.cost.model import Linear, ModelShape, flops_of, mean_keys
from lightning_afd.cost.routing import expected_copies, sampling_imbalance, visits
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.cost.traffic import load_of, traffic
from lightning_afd.errors import PlanError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.peers import Peers
from lightning_afd.placement import Layout, Worker
from lightning_afd.recipes.shapes import named_cluster, named_model

A0, F0 = Worker("A", 0), Worker("F", 0)
TRUE = Choices(precision=PRECISIONS["bf16-true"], dedup="node")
named, cluster_of = cache(named_model), cache(named_cluster)


def job_of(name: str, layout: Layout, length: int = 8192, choices: Choices = TRUE) -> Job:
    return Job(
        model=named(name),
        layout=layout,
        cluster=cluster_of("h800_16x8"),
        batch=BatchShape.rows(1, length),
        micro_batches=16,
        choices=choices,
    )


@pytest.mark.parametrize(
    ("name", "ratios"),
    [
        ("deepseek_moe_paper", (0.73, 0.97, 1.45, 2.42)),
        ("gpt_oss_paper", (0.44, 0.60, 0.94, 1.62)),
        ("gpt_oss_120b", (0.36, 0.44, 0.61, 0.95)),  # half of the layers with a window of 128
        ("qwen3_paper", (0.69, 0.92, 1.36, 2.25)),
    ],
)
def test_attention_and_ffn_flops_of_the_paper_models(name: str, ratios: tuple[float, ...]) -> None:
    """(Projections + causal core) / experts at 4K to 32K, counted by hand from the published shapes."""
    model = named(name)
    found = []
    for length in (4096, 8192, 16384, 32768):
        attention = sum(
            flops_of(layer.attention.linears) + layer.attention.core_flops(mean_keys(length, layer.attention.window))
            for layer in model.layers
        )
        found.append(attention / sum(layer.flops for layer in model.moe))
    assert found == pytest.approx(ratios, abs=0.006)


def test_seconds_of_one_layer() -> None:
    """DeepSeek-MoE at 8K on an H800: GEMMs, causal core and elementwise bytes by hand, per token."""
    job = job_of("deepseek_moe_paper", Layout(attention=8, ffn=8))
    costs, tokens = step_costs(job), 8192
    peak, hbm, tiles = 989e12, 3350e9 * 0.7, 8192 / (8192 + 64)
    copies = expected_copies([8] * 8, 64, 4)
    gemm, core = (33.55e6 + 0.26e6) / (peak * 0.65 * tiles), 33.56e6 / peak
    elementwise = 2 * (14 * 2048 + 4 * 6144 + 2 * (copies + 1) * 2048) / hbm
    forward = tokens * (gemm + core / 0.6 + elementwise)
    backward = tokens * (2 * gemm + 2.5 * core / 0.5 + 1.5 * elementwise)
    assert costs.actions["A", 1, "f"].seconds == pytest.approx(forward, rel=0.02)
    assert costs.actions["A", 1, "b"].seconds == pytest.approx(backward, rel=0.02)
    rows = 8 * 8192 * 4 / 8
    experts = rows * 6 * 2048 * 1408 / (peak * 0.55 * (rows / 8) / (rows / 8 + 64))
    moved = rows * 2 * (3 * 1408 + 2048) / hbm
    found = [costs.actions["E", 1, phase].seconds for phase in ("f", "b", "w")]  # type: ignore[index]
    assert found == pytest.approx([experts + moved, experts + 1.5 * moved, experts], rel=0.02)


def test_a_split_backward_adds_up() -> None:
    layout = Layout(attention=8, ffn=8)
    whole, split = (
        step_costs(job_of("qwen3_30b_a3b", layout, choices=replace(TRUE, split_attention=flag)))
        for flag in (False, True)
    )
    for segment in (0, 5, 48):
        parts = split.actions["A", segment, "b"].seconds + split.actions["A", segment, "w"].seconds
        assert parts == pytest.approx(whole.actions["A", segment, "b"].seconds)
    assert ("A", 5, "w") not in whole.actions


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v3"])
def test_every_action_has_a_cost(groups: int, name: str) -> None:
    layout = Layout(attention=3, ffn=5, groups=groups)
    costs = step_costs(job_of(name, layout, choices=replace(TRUE, router_logits=True)))
    known = {(action.op, action.layer, action.phase) for action in costs.shape.actions()}
    assert known == set(costs.actions)
    assert all(costs.of(action).seconds > 0 for action in costs.shape.actions())
    compute = sum(busy.compute for busy in costs.busy().values())
    assert compute == pytest.approx(sum(cost.seconds for key, cost in costs.actions.items() if key[0] in "AE"))
    assert costs.bound() == 16 * max(busy.bound for busy in costs.busy().values())


def test_copies_against_enumeration() -> None:
    """All choices of 3 among 7 experts on 3 ranks, divided unevenly."""
    owner = ExpertMap.contiguous(7, 3).expert_to_rank
    chosen = list(combinations(range(7), 3))
    mean = sum(len({owner[expert] for expert in choice}) for choice in chosen) / len(chosen)
    assert expected_copies([3, 2, 2], 7, 3) == pytest.approx(mean)
    assert visits(7, 7, 3) == 1.0 and visits(0, 7, 3) == 0.0
    assert expected_copies([1] * 8, 8, 2) == pytest.approx(2.0)


@pytest.mark.parametrize(("top_k", "copies"), [(4, (1, 1.88, 2.73, 3.31)), (8, (1, 1.99, 3.60, 5.25))])
def test_copies_of_many_experts(top_k: int, copies: tuple[float, ...]) -> None:
    """With many experts drawing without replacement is drawing with it: n (1 - (1 - 1/n)^K)."""
    experts = 2**20
    found = [expected_copies([experts // n] * n, experts, top_k) for n in (1, 2, 4, 8)]
    assert found == pytest.approx(copies, abs=0.01)


def test_bytes_of_a_dispatch() -> None:
    """Four F nodes, one copy per node; the base hop is one more row on the A side's NIC."""
    layout = Layout(attention=32, ffn=32, groups=2)
    costs = step_costs(job_of("qwen3_paper", layout))
    row, copies = 4096 * 2, expected_copies([32] * 4, 128, 8)
    hop = costs.actions["H", 1, "f"].sent_bytes
    assert hop == pytest.approx(8192 * (row + 8 * expected_copies([4] * 32, 128, 8)))
    busy = costs.busy()
    ratio = busy[Worker("A", 0)].send / busy[F0].receive
    assert ratio == pytest.approx((copies + 1) / copies, rel=0.03)
    without = replace(TRUE, dedup="none")
    plain = step_costs(job_of("qwen3_paper", layout, choices=without)).actions["D", 1, "b"]
    assert plain.sent_bytes == pytest.approx(8192 * 8 * row) and plain.over_nic
    once = costs.actions["D", 1, "b"]
    assert once.sent_bytes == pytest.approx(8192 * copies * row)
    assert once.seconds > once.latency + max(once.send_seconds, once.receive_seconds) * 0.999


def test_what_stays_in_a_node_does_not_need_its_nics() -> None:
    costs = step_costs(job_of("deepseek_v2_lite", Layout(attention=4, ffn=4)))
    assert not any(cost.over_nic for cost in costs.actions.values())
    apart = step_costs(job_of("deepseek_v2_lite", Layout(attention=4, ffn=5)))
    assert apart.actions["D", 3, "f"].over_nic


def test_nics_can_be_given_to_one_side() -> None:
    layout = Layout(attention=64, ffn=64)
    even = step_costs(job_of("qwen3_paper", layout)).busy()
    moved = step_costs(job_of("qwen3_paper", layout, choices=replace(TRUE, attention_nics=1.5, ffn_nics=0.5))).busy()
    assert moved[A0].send < even[A0].send and moved[F0].receive > even[F0].receive


def test_the_busiest_rank_sets_the_pace() -> None:
    layout = Layout(attention=8, ffn=8)
    even, hot = (step_costs(job_of("qwen3_paper", layout, choices=replace(TRUE, imbalance=x))) for x in (1.0, 1.5))
    assert hot.actions["E", 1, "w"].seconds == pytest.approx(1.5 * even.actions["E", 1, "w"].seconds, rel=0.01)
    job = job_of("gpt_oss_20b", Layout(attention=8, ffn=5))
    load = load_of(job, job.model.moe[0])  # 32 experts on 5 ranks: one has 7
    assert (load.experts, load.slots) == (7, 8 * 8192 * 4 * 7 / 32)
    uneven = step_costs(job).actions["D", 1, "f"]
    assert uneven.received_bytes > 8 / 5 * uneven.sent_bytes
    assert sampling_imbalance(8192, 128, 8, 16) == pytest.approx(1.03, abs=0.02)
    assert sampling_imbalance(8192, 128, 8, 1) == 1.0


def test_recompute_and_shared_experts_cost_time() -> None:
    layout = Layout(attention=8, ffn=8)
    plain, again, moved = (
        step_costs(job_of("deepseek_v3", layout, choices=choices))
        for choices in (
            TRUE,
            replace(TRUE, recompute="full", recompute_experts=True),
            replace(TRUE, shared_experts="ffn"),
        )
    )
    assert again.actions["A", 5, "b"].seconds > 1.2 * plain.actions["A", 5, "b"].seconds
    assert again.actions["E", 5, "b"].seconds > 1.2 * plain.actions["E", 5, "b"].seconds
    assert again.actions["A", 5, "f"] == plain.actions["A", 5, "f"]
    assert moved.actions["A", 5, "f"].seconds < plain.actions["A", 5, "f"].seconds
    assert moved.actions["E", 5, "f"].seconds > plain.actions["E", 5, "f"].seconds


def test_update_of_the_dense_parameters() -> None:
    job = job_of("qwen3_30b_a3b", Layout(attention=16, ffn=16))
    update, parameters = step_costs(job).update, job.model.parameters()
    dense = parameters.total - parameters.experts
    assert update.all_reduce_bytes == 2 * dense
    latency = 49 * 2 * (3 * 10e-6 + 30e-6)  # of each segment, up and down a tree over the ranks of two nodes
    assert update.all_reduce_seconds == pytest.approx(2 * 7 / 8 * 2 * dense / 160e9 + latency, rel=0.05)
    shard = replace(TRUE, shard_optimizer=True)
    assert step_costs(job_of("qwen3_30b_a3b", Layout(attention=1, ffn=1), choices=shard)).update.all_reduce_seconds == 0


def test_packed_rows_cost_what_their_documents_cost() -> None:
    def forward(*lengths: int) -> float:
        job = replace(job_of("qwen3_30b_a3b", Layout(attention=8, ffn=8)), batch=BatchShape(lengths=lengths))
        return step_costs(job).actions["A", 1, "f"].seconds

    assert forward(4096, 4096) < forward(8192)
    one, half = forward(8192) - forward(4096, 4096), forward(4096, 4096) - forward(2048, 2048, 2048, 2048)
    assert one == pytest.approx(2 * half, rel=0.01)  # the core grows with the sum of squares


@pytest.mark.parametrize("name", ["h800_16x8", "h100_16x8", "h200_8x8", "a100_16x8", "local"])
def test_clusters_can_be_read(name: str) -> None:
    cluster = named_cluster(name)
    if name != "local":
        nodes, devices = map(int, name.split("_")[1].split("x"))
        assert (cluster.num_nodes, cluster.devices_per_node, cluster.devices) == (nodes, devices, nodes * devices)
        assert cluster.ports == 1.0
    assert 0 < cluster.device.memory_bytes < cluster.device.memory_gb * 1e9
    assert cluster.device.peak("bfloat16") > cluster.device.peak("float32")


def test_wrong_clusters_are_one_sentence() -> None:
    good = {"num_nodes": 1, "devices_per_node": 1, "device": {}, "nics_per_node": 1, "nic": {}, "nvlink": {}}
    with pytest.raises(PlanError, match=r"cluster\.device lacks efficiency, hbm_gb_per_s, host_us, memory_gb"):
        Cluster.read(good)
    with pytest.raises(
        PlanError, match="cluster has no setting nodes; it has at_once, device, devices_per_node, nic, "
    ):
        Cluster.read({**good, "nodes": 1})
    with pytest.raises(PlanError, match="A100-SXM-80GB has no peak for float8: known are bfloat16"):
        named_cluster("a100_16x8").device.peak("float8")
    with pytest.raises(PlanError, match=r"cluster\.num_nodes=0: more than 0 is needed"):
        replace(named_cluster("local"), num_nodes=0)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("gpt_oss_20b", Layout(attention=1, ffn=33), "ffn=33 ranks for 32 experts"),
        ("gpt_oss_20b", Layout(attention=1, ffn=1, groups=25), "groups=25 for 24 MoE layers"),
        ("qwen3_paper", Layout(attention=65, ffn=64), "65A \\+ 64F are 129 ranks, but the cluster has 128 devices"),
    ],
)
def test_jobs_that_cannot_be(name: str, layout: Layout, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        job_of(name, layout)


def test_small_messages_and_small_gemms_are_slow() -> None:
    cluster = named_cluster("h800_16x8")
    half = cluster.nic.half_kib * 1024
    assert cluster.nic.utilisation(half) == 0.5
    one, many = cluster.nic.busy_seconds(64 * half), cluster.nic.busy_seconds(64 * half, 64)
    assert many == pytest.approx(2 * one, rel=0.02)
    assert cluster.nic.busy_seconds(0.0) == 0.0
    device, square = cluster.device, Linear(8192, 8192)
    per_row = [device.gemm_seconds(square, rows, "bfloat16") / rows for rows in (16, 128, 1024, 65536)]
    assert per_row == sorted(per_row, reverse=True)
    weights = device.memory_seconds(8192 * 8192 * 2)
    assert device.gemm_seconds(square, 1, "bfloat16") == pytest.approx(weights, rel=0.01)  # bound by reading them
    spread = device.gemm_seconds(square, 4096, "bfloat16", groups=64)
    assert spread > device.gemm_seconds(square, 4096, "bfloat16", groups=1)


def step_of(model: ModelShape) -> StepCosts:
    return step_costs(replace(job_of("qwen3_paper", Layout(attention=2, ffn=2)), model=model))


def test_a_model_without_experts_cannot_be_split() -> None:
    from tiny import hf_config

    dense = model_shape(hf_config("qwen3_moe", mlp_only_layers=[0, 1, 2]).to_dict())
    with pytest.raises(PlanError, match="no layer with routed experts"):
        step_of(dense)
    trailing = model_shape(hf_config("qwen3_moe", mlp_only_layers=[0, 2]).to_dict())
    assert [len(segment.layers) for segment in trailing.segments] == [2, 1]
    assert step_of(trailing).shape.layers == 1


def test_cores_that_move_messages_compute_less() -> None:
    """Each end of each message, dispatch and combine, forward and backward, and of the base hop; none elsewhere."""
    layout = Layout(attention=2, ffn=3, groups=2)
    plain = job_of("qwen3_30b_a3b", layout, choices=replace(TRUE, dedup="rank"))
    links = {n: replace(getattr(plain.cluster, n), host_us=50.0, host_us_per_mib=10.0) for n in ("nic", "nvlink")}
    moving = replace(plain, cluster=replace(plain.cluster, **links))
    costs, before = step_costs(moving), step_costs(plain)
    mib = {key: (cost.sent_bytes / 2**20, cost.received_bytes / 2**20) for key, cost in before.actions.items()}
    for phase in ("f", "b"):
        extra = {op: costs.actions[op, 1, phase].seconds - before.actions[op, 1, phase].seconds for op in "AE"}
        (d_sent, d_got), (c_sent, c_got) = mib["D", 1, phase], mib["C", 1, phase]
        hop = sum(mib["H", 1, phase])
        assert extra["A"] == pytest.approx(1e-6 * (50 * (3 + 3 + 2) + 10 * (d_sent + c_got + hop)))
        assert extra["E"] == pytest.approx(1e-6 * (50 * (2 + 2) + 10 * (d_got + c_sent)))
    assert costs.actions["E", 1, "w"] == before.actions["E", 1, "w"]


@pytest.mark.parametrize(("attention", "ffn"), [(1, 12), (3, 14), (9, 12), (16, 16), (20, 12)])
def test_relays_of_a_node_take_whole_attention_ranks(attention: int, ffn: int) -> None:
    """One copy per node comes to the F rank of it whose turn it is: with few A ranks some have nothing to take."""
    job = job_of("qwen3_paper", Layout(attention=attention, ffn=ffn, node_ranks=8))
    rows = traffic(job, job.model.moe[0], A0, F0)
    shape = replace(job.shape, spreads=True)
    nodes = {rank: job.cluster.node_of(rank) for rank in range(job.layout.world)}
    busiest = 0.0
    for rank in job.layout.ranks_of(F0):
        peers = Peers(job.layout, shape, rank)
        per_node = visits(sum(128 // ffn + (place < 128 % ffn) for place in peers.node), 128, 8)
        far = [other for other in peers.attention_ranks(0) if nodes[other] != nodes[rank]]
        busiest = max(busiest, len(far) * 8192 * per_node)
    assert rows.ffn.nic_rows == pytest.approx(busiest)
