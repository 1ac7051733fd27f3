"""Plans for replicas with batches of their own: compared by row, on all ranks, against what they can fall back to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_cases import cluster, model

from lightning_afd.allocate.choose import Effort
from lightning_afd.allocate.replica import Replicas, choose_for_replicas, cuts, per_row, predicted_seconds
from lightning_afd.allocate.request import RUNGS, Request
from lightning_afd.cost.job import BatchShape
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout

LAYOUTS = (*(Layout(attention=a, ffn=8 - a) for a in range(1, 8)), Layout(attention=2, ffn=2, groups=2))


def job(nic: float = 400, **changes: Any) -> Replicas:
    """Eight devices, four rows of 4096 tokens for each replica."""
    given = {"layouts": LAYOUTS, "micro_batches": (1, 2, 4), "rungs": RUNGS[:1], "memory_gb": 1e6} | changes
    devices = cluster(devices=8, memory_gb=given.pop("memory_gb"), nic=nic)
    devices = replace(devices, nvlink=devices.nic)
    request = Request(
        model=model(layers=6), cluster=devices, batch=BatchShape.rows(1, 1), parts=1, rungs=given.pop("rungs")
    )
    return Replicas(request=request, rows=4, length=4096, **given)


def test_the_choice_is_the_best_per_row_of_all() -> None:
    asked = job()
    plan = choose_for_replicas(asked, Effort(layouts=24))
    best = plan.candidates[0]
    everything = {
        (layout, count): predicted_seconds(asked, layout, count) / layout.attention
        for layout in LAYOUTS
        for count in (1, 2, 4)
    }
    assert per_row(best)[0] <= min(everything.values()) * 1.001
    assert best.layout.world == 8 and best.passes == 1 and best.micro_batches in (1, 2, 4)
    worse = choose_for_replicas(job(layouts=(Layout(attention=1, ffn=7),)), Effort()).candidates[0]
    assert worse.layout == Layout(attention=1, ffn=7) and per_row(worse) > per_row(best)


def test_the_verdict_is_about_as_many_rows() -> None:
    """The collocated layout has eight replicas: its time is scaled to those of the plan."""
    quick, slow = (choose_for_replicas(job(nic), Effort()) for nic in (400, 0.5))
    for plan in (quick, slow):
        (other,) = plan.verdict.collocated
        assert other.micro_batches in (1, 2, 4) and other.recompute == "none"
        assert plan.verdict.disaggregate == (plan.candidates[0].seconds <= other.seconds)
    assert slow.verdict.dead_zone and not quick.verdict.dead_zone
    one = choose_for_replicas(job(400, micro_batches=(1,), layouts=LAYOUTS[:1]), Effort()).verdict.collocated[0]
    two = choose_for_replicas(job(400, micro_batches=(1,), layouts=LAYOUTS[1:2]), Effort()).verdict.collocated[0]
    assert two.seconds == pytest.approx(2 * one.seconds)


def test_shared_cores_slow_both_down_once() -> None:
    """Half as many cores as ranks: computation takes twice as long on collocated ranks, which all compute at once."""
    asked = job(micro_batches=(1,), layouts=LAYOUTS[3:4])
    shared = replace(asked.request.cluster, at_once=asked.request.cluster.devices_per_node / 2)
    crowded = replace(asked, request=replace(asked.request, cluster=shared))
    alone, together = (choose_for_replicas(each, Effort()) for each in (asked, crowded))
    (one,), (two,) = alone.verdict.collocated, together.verdict.collocated
    assert 1.7 < two.seconds / one.seconds <= 2
    assert 1 < together.candidates[0].seconds / alone.candidates[0].seconds <= 2


def test_what_does_not_fit_is_not_chosen() -> None:
    roomy = choose_for_replicas(job(rungs=RUNGS), Effort()).candidates[0]
    one = {"layouts": (roomy.layout,), "micro_batches": (roomy.micro_batches,)}
    tight = choose_for_replicas(job(rungs=RUNGS, memory_gb=roomy.memory_bytes / 1e9, **one), Effort()).candidates[0]
    assert tight.memory_bytes < roomy.memory_bytes * 0.95 and tight.seconds >= roomy.seconds
    with pytest.raises(PlanError, match=r"none of 8 layouts of 8 x H800-SXM-80GB fits into the"):
        choose_for_replicas(job(memory_gb=0.1), Effort())


def test_micro_batches_are_equal_parts() -> None:
    assert [cuts(rows) for rows in (1, 6, 32)] == [(1,), (1, 2, 3, 6), (1, 2, 4, 8, 16)]
