"""Costs of collocated layouts by closed formulas, and predictions of all methods."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from lightning_afd.baselines.apart import best_apart, steps_apart
from lightning_afd.baselines.collocated import Collocated, Costs
from lightning_afd.baselines.predict import METHODS, Setting, predict_baselines, trial, tuned
from lightning_afd.baselines.stages import Stages
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices, Job
from lightning_afd.cost.model import ModelShape
from lightning_afd.cost.sums import sum_seconds
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout, Worker
from lightning_afd.recipes.shapes import named_cluster, named_model
from lightning_afd.simulate import simulate


@cache
def model() -> ModelShape:
    """Eight layers of the paper's DeepSeek-MoE."""
    whole = named_model("deepseek_moe_paper")
    return replace(whole, layers=whole.layers[:8])


@cache
def cluster() -> Cluster:
    return named_cluster("h800_16x8")


def job_of(length: int = 4096, nodes: int = 4, **choices: object) -> Job:
    return Job(
        model=model(),
        layout=Layout(attention=8, ffn=8),
        cluster=replace(cluster(), num_nodes=nodes),
        batch=BatchShape.rows(1, length),
        micro_batches=16,
        choices=replace(Choices(precision=PRECISIONS["bf16-true"], dedup="node"), **choices),  # type: ignore[arg-type]
    )


def costs_of(job: Job, experts: int, parts: int = 1, stages: int = 1) -> Costs:
    shape = Stages(layers=8, groups=stages, chunks=stages, micro_batches=parts)
    return Costs(job=job, layout=Collocated(data=experts, experts=experts, stages=stages), shape=shape, parts=parts)


@pytest.mark.parametrize(("dedup", "rows"), [("none", 2.0), ("node", 0.94), ("rank", 1.84)])
def test_rows_that_leave_a_node(dedup: str, rows: float) -> None:
    """Two nodes: k/2 rows per token, or distinct(k, n)(n - 1)/n = 15/16, or distinct ranks' halves."""
    job = job_of(dedup=dedup)
    nic = job.cluster.nic
    seconds = costs_of(job, 16).load().bytes
    from lightning_afd.schedule.actions import Action

    rate = nic.gb_per_s * 1e9 * nic.efficiency
    sent = seconds(Action("D", 0, "b", 0)) / (4096 * 2048 * 2)
    assert sent == pytest.approx(rows, rel=0.06)  # hypergeometric, and messages of finite size
    assert costs_of(job, 16).load().links["D"].attention == rate


def test_inside_a_node_nothing_crosses_the_network() -> None:
    inside, across = (costs_of(job_of(), experts).load().links for experts in (8, 16))
    assert inside["D"] != inside["H"]
    assert across["D"] == across["H"]


def test_parts_share_the_time_of_attention() -> None:
    whole, halves = (costs_of(job_of(), 16, parts) for parts in (1, 2))
    assert 2 * halves.seconds_of("A") == pytest.approx(whole.seconds_of("A"))
    assert whole.seconds_of("E") < 2 * halves.seconds_of("E") < 1.2 * whole.seconds_of("E")  # fewer rows per matrix


def test_all_reduce_uses_all_nics_of_a_node() -> None:
    """1 GB over 4 nodes of 8: each rank's NIC carries 2 x 3/4 of an eighth, links inside 2 x 7/8."""
    nic, nvlink = (link.gb_per_s * 1e9 * link.efficiency for link in (cluster().nic, cluster().nvlink))
    expected = max(2 * 3 / 4 * 1e9 / 8 / nic, 2 * 7 / 8 * 1e9 / nvlink)
    assert sum_seconds(cluster(), 1e9, 32) == pytest.approx(expected, rel=0.01)
    assert sum_seconds(cluster(), 1e9, 1) == 0


def test_stages_hold_the_whole_model() -> None:
    """Over all stages, weights and gradients (2 + 2 bytes) and optimizer state (4) are those of the model."""
    costs = costs_of(job_of(), 8, stages=2)
    parameters = model().parameters()
    found = sum(costs._fixed_memory(stage) for stage in range(2))
    dense = parameters.total - parameters.experts - model().final_norm_parameters
    assert found == pytest.approx(8 * (dense + parameters.experts / 8), rel=1e-6)


def test_every_method_is_predicted() -> None:
    found = predict_baselines(job_of(), most=1)
    assert set(found) == {f"{name}, {nodes}" for name in METHODS for nodes in ("1 node", "2 nodes")}
    for prediction in found.values():
        assert prediction.seconds >= prediction.simulation.bound
        assert 0 <= prediction.exposed < 0.6
        assert 0 < prediction.bound[1] <= 1
        assert prediction.trial.memory > prediction.trial.least_memory
    assert found["experts-only, 2 nodes"].seconds < found["exposed, 2 nodes"].seconds
    assert found["dualpipe, 2 nodes"].exposed < found["exposed, 2 nodes"].exposed


def test_slower_links_cost_exposed_transfers() -> None:
    fast, slow = job_of(dedup="none"), job_of(dedup="none")
    slow = replace(slow, cluster=replace(slow.cluster, nic=replace(slow.cluster.nic, efficiency=0.4)))
    one, other = (tuned(job, "exposed", 16, most=1) for job in (fast, slow))
    assert one is not None
    assert other is not None
    assert other.seconds > 1.2 * one.seconds


def test_what_does_not_fit_is_computed_twice_or_said() -> None:
    job = job_of(16384)

    def limited(gigabytes: float) -> Job:
        device = replace(job.cluster.device, memory_gb=gigabytes)
        return replace(job, cluster=replace(job.cluster, device=device))

    roomy = tuned(limited(math.inf), "exposed", 8, most=1)
    assert roomy is not None
    tight = tuned(limited(0.9 * roomy.trial.memory / 1e9), "exposed", 8, most=1)
    assert tight is not None
    assert tight.trial.fits
    assert tight.trial.setting != roomy.trial.setting
    nothing = tuned(limited(1), "exposed", 8, most=1)
    assert nothing is not None
    assert not nothing.trial.fits


def test_methods_that_cannot_run_are_left_out() -> None:
    """On one node of 8 nothing is shared by two, and two directions need two stages of 8 ranks."""
    job = replace(job_of(), layout=Layout(attention=4, ffn=4), cluster=replace(cluster(), num_nodes=1))
    assert set(predict_baselines(job, most=1)) == {"exposed, 1 node", "experts-only, 1 node", "flowmoe, 1 node"}
    with pytest.raises(PlanError, match="12 ranks in groups of 8"):
        Collocated(data=12, experts=8)


def test_an_exposed_step_by_hand() -> None:
    """One stage: everything one after another, then the last reduce of what all ranks hold, and the optimizer."""
    job = job_of(nodes=2)
    setting = Setting(method="exposed", layout=Collocated(data=16, experts=16))
    found = trial(job, setting, 3)
    costs = found.costs
    load = replace(costs.load(), reduce=lambda worker, layer: 0)
    latency = 32 * load.links["D"].latency  # four transfers of eight layers
    computed, sent = costs.work()
    assert simulate(found.schedule, load).seconds == pytest.approx(3 * (computed[0] + sent[0] + latency))
    assert found.run().seconds > 3 * (computed[0] + sent[0] + latency) + costs.update_seconds()


def test_separate_workers_are_tuned_alike() -> None:
    orders = steps_apart(job_of(), most=1)
    assert set(orders) == {"af-pipe", "zero-bubble"}
    best = best_apart(job_of(), most=1)
    assert best.seconds == min(step.seconds for step in orders.values())
    layout = best.division.job.layout
    assert layout.world <= 32
    assert best.division.job.micro_batches * layout.attention >= 128
    assert best.seconds >= best.simulation.bound
    busy = best.division.costs.busy()
    sent = best.simulation.busy
    for worker in (Worker("A", 0), Worker("F", 0)):
        total = sum(seconds for (who, _, way), seconds in sent.items() if who == worker and way == "send")
        expected = busy[worker].send * best.division.job.micro_batches
        assert total == pytest.approx(expected, rel=0.05)
