"""From measured seconds to the rates of a cluster: exact on figures that were made from known rates."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_afd.allocate.simulated import shared_seconds
from lightning_afd.cost.hardware import Cluster, Link, Scale
from lightning_afd.cost.measured import (
    Figures,
    Handled,
    Point,
    Sample,
    fit_handling,
    fit_link,
    fit_scale,
    measured_cluster,
    slowdown,
)
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.recipes.shapes import named_cluster
from lightning_afd.schedule.actions import Action
from lightning_afd.timeline import Span, Timeline


def samples(link: Link, ports: float = 1.0) -> list[Sample]:
    """What messages over a link take."""
    return [
        Sample(messages=count, nbytes=size, seconds=link.latency + link.busy_seconds(count * size, count, ports))
        for size in (2**12, 2**16, 2**20)
        for count in (1, 8)
    ]


@pytest.mark.parametrize("half_kib", [0.0, 100.0])
@pytest.mark.parametrize("latency_us", [0.0, 80.0])
def test_a_link_is_found_again(half_kib: float, latency_us: float) -> None:
    link = Link(gb_per_s=3.0, efficiency=0.5, latency_us=latency_us, half_kib=half_kib)
    found = fit_link(samples(link, ports=2.0), ports=2.0)
    assert found.gb_per_s * found.efficiency == pytest.approx(1.5)
    assert found.latency_us == pytest.approx(latency_us, abs=1e-3)
    assert found.half_kib == pytest.approx(half_kib, abs=1e-3)


def test_noise_never_makes_a_negative_part() -> None:
    """Here the line through all samples has a negative latency."""
    few = [Sample(messages=1, nbytes=2**12, seconds=1e-6), Sample(messages=1, nbytes=2**20, seconds=2e-3)]
    found = fit_link([*few, Sample(messages=8, nbytes=2**20, seconds=10e-3)])
    assert min(found.latency_us, found.half_kib) >= 0 and found.gb_per_s > 0


def test_messages_that_are_no_slower_when_longer_are_refused() -> None:
    with pytest.raises(PlanError, match="have no rate"):
        fit_link([Sample(messages=1, nbytes=0, seconds=1e-3)])


def test_handling_is_found_again() -> None:
    """The mean of two ranks; ranks without a partner say nothing."""
    link = Link(gb_per_s=1, efficiency=1, latency_us=0, half_kib=0, host_us=100.0, host_us_per_mib=400.0)
    sizes = (2**12, 2**17, 2**20)
    slow, fast = ([Handled(nbytes=n, seconds=factor * link.host_seconds(n)) for n in sizes] for factor in (1.5, 0.5))
    assert fit_handling([slow, fast]) == pytest.approx({"host_us": 100.0, "host_us_per_mib": 400.0})
    assert fit_handling([]) == {}
    backwards = [Handled(nbytes=2**12, seconds=2e-3), Handled(nbytes=2**20, seconds=1e-3)]
    assert fit_handling([backwards])["host_us_per_mib"] == 0


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(2.0, 3.0)], Scale(factor=1.5)),
        ([(1.0, 2.0), (3.0, 5.0)], Scale(factor=1.5, fixed_us=0.5e6)),
        ([(3.0, 5.0), (1.0, 2.0)], Scale(factor=1.5, fixed_us=0.5e6)),
        ([(1.0, 1.0), (1.1, 3.2)], Scale(factor=2.0)),  # too near each other for a line
        ([(1.0, 1.0), (3.0, 7.0)], Scale(factor=2.0)),  # a line would begin below zero
    ],
)
def test_scales(points: Sequence[tuple[float, float]], expected: Scale) -> None:
    found = fit_scale([Point(estimate=estimate, seconds=seconds) for estimate, seconds in points])
    assert (found.factor, found.fixed_us) == pytest.approx((expected.factor, expected.fixed_us))


def test_no_time_is_refused() -> None:
    with pytest.raises(PlanError, match="must be positive"):
        fit_scale([Point(estimate=1.0, seconds=0.0)])


def figures(node: int, seconds: float, alone: float = 0.0) -> Figures:
    """A rank that takes so long for what the model says takes a second."""
    return Figures(
        node=node,
        together={"Af": [Point(estimate=1.0, seconds=seconds)]},
        alone={"Af": [Point(estimate=1.0, seconds=alone)]} if alone else {},
    )


def test_the_slowest_rank_counts() -> None:
    base = named_cluster("local")
    found = measured_cluster(base, [figures(0, 2.0), figures(0, 5.0), figures(0, 1.0)])
    assert found.device.scales == {"Af": Scale(factor=5.0)}
    assert (found.nic, found.nvlink, found.at_once) == (base.nic, base.nvlink, math.inf)  # nobody has measured these


def test_ranks_that_share_cores() -> None:
    """All four take twice as long as one of them alone: two compute at full speed, and each as fast as one alone."""
    ranks = [figures(0, 2.0, alone=1.0), *(figures(0, 2.2) for _ in range(3))]
    found = measured_cluster(named_cluster("local"), ranks)
    assert slowdown(ranks) == 2.0
    assert found.at_once == 2.0 and found.crowd == 2.0
    assert found.device.scales["Af"].factor == pytest.approx(1.1)
    assert measured_cluster(named_cluster("local"), [figures(0, 1.02, alone=1.0)] * 4).crowd == 1.0


def test_links_of_the_slowest_pair() -> None:
    fast, slow = (Link(gb_per_s=rate, efficiency=1.0, latency_us=10.0, half_kib=4.0) for rate in (8.0, 1.0))
    ranks = [replace(figures(node, 1.0), near=samples(fast), far=samples(slow)) for node in (0, 0, 1, 1)]
    ranks[2] = replace(ranks[2], near=samples(slow))
    base = replace(named_cluster("local"), nics_per_node=4)
    found = measured_cluster(base, ranks)
    assert found.nvlink.gb_per_s == pytest.approx(1.0) and found.nic.gb_per_s == pytest.approx(1.0)


def test_a_measured_cluster_goes_through_json() -> None:
    ranks = [figures(0, 2.0, alone=1.0), figures(0, 2.5)]
    for cluster in (named_cluster("local"), measured_cluster(named_cluster("local"), ranks)):
        again = Cluster.read(json.loads(json.dumps(cluster.as_dict(), allow_nan=False)))
        assert again == cluster


def step(*spans: tuple[str, int, float, float]) -> Timeline:
    """Compute spans of a job of one A and one F rank."""
    return Timeline(Layout(attention=1, ffn=1), tuple(Span(Action.parse(n), r, s, e) for n, r, s, e in spans))


def test_a_step_on_shared_cores_is_stretched_where_ranks_compute_at_the_same_time() -> None:
    timeline, one = step(("A0f0", 0, 0.0, 4.0), ("E0f0", 1, 3.0, 5.0), ("C0f0", 0, 4.0, 6.0)), named_cluster("local")
    seconds = {
        cores: shared_seconds(timeline, Layout(attention=1, ffn=1), replace(one, at_once=cores)) for cores in (1, 2)
    }
    assert seconds == {1: 7.0, 2: 6.0}
    two_each = shared_seconds(timeline, Layout(attention=2, ffn=2), replace(one, at_once=2))
    assert two_each == 7.0
    apart = replace(one, at_once=1, devices_per_node=1, num_nodes=2)
    assert shared_seconds(timeline, Layout(attention=1, ffn=1), apart) == 6.0  # on nodes of their own
    assert shared_seconds(timeline, Layout(attention=2, ffn=2), one) == 6.0  # on cores of their own


def test_shared_cores_lose_no_work() -> None:
    """Three ranks on one core are busy as long as all their work takes."""
    spans = [("A0f0", 0, 0.0, 1.0), ("A0f1", 0, 1.0, 3.0), ("E0f0", 1, 1.0, 2.5), ("E0f1", 1, 2.75, 4.0)]
    layout, cluster = Layout(attention=2, ffn=1), replace(named_cluster("local"), at_once=1)
    work = Counter({0: 2 * 3.0, 1: 2.75})
    assert shared_seconds(step(*spans), layout, cluster) == pytest.approx(work.total())
