"""Calibration: what is measured where, on a clock that is known; the user's model stays as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from tiny import hf_config, tiny, tiny_hf
from torch import nn

from lightning_afd.allocate.choose import Effort, choose
from lightning_afd.calibrate import RankLinks, calibrate
from lightning_afd.calibrate.handling import SIZES as HANDLED
from lightning_afd.calibrate.handling import measure_handling
from lightning_afd.calibrate.links import COUNTS, far_peer, measure_pair, near_peer
from lightning_afd.calibrate.setting import Setting
from lightning_afd.cost.hardware import Cluster, Link
from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices
from lightning_afd.cost.measured import fit_link
from lightning_afd.cost.times import StepCosts, step_costs
from lightning_afd.errors import PlanError
from lightning_afd.model.sample import sample_of
from lightning_afd.placement import Layout
from lightning_afd.recipes.shapes import named_cluster

CPU = torch.device("cpu")
BATCH = BatchShape.rows(2, 8)
CHOICES = Choices(precision=PRECISIONS["32"])


def on_meta(name: str = "qwen3_moe", **fields: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(hf_config(name, **fields))
    return model


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that goes on by so many seconds whenever somebody looks."""
    return map(float(seconds).__mul__, itertools.count()).__next__


def alone(now: Callable[[], float]) -> RankLinks:
    """A job of one rank."""
    return RankLinks(rank=0, world=1, nodes=(0,), device=CPU, gather=lambda value: [value], mail=Silent(), now=now)


class Silent:
    """Nobody writes."""

    def post(self, peer: int, nbytes: int) -> Any:
        raise AssertionError("there is nobody to receive from")

    send = post


def calibrated(model: nn.Module, now: Callable[[], float], choices: Choices = CHOICES) -> Cluster:
    found = calibrate(
        model,
        BATCH,
        named_cluster("local"),
        alone(now),
        budget_seconds=0.0,
        progress=lambda text, share: None,
        choices=choices,
    )
    return found.cluster


def estimates(model: nn.Module) -> StepCosts:
    setting = Setting(device=CPU, batch=BATCH, cluster=named_cluster("local"), choices=CHOICES)
    return step_costs(setting.job(sample_of(model, torch.float32, CPU), Layout(attention=1, ffn=1)))


@pytest.mark.parametrize("tick", [1.0, 2.0])
def test_every_kind_gets_the_time_that_it_took(tick: float) -> None:
    """Each computation, packing or unpacking takes one tick, and one more before each wait for a message.

    Of two layers: Af = 2 segments + 2 dispatches + the first layer's combine; the tail has the second one's.
    """
    model = on_meta()
    scales, costs = calibrated(model, ticking(tick)).device.scales, estimates(model)
    ticks = {"Af": 2 + 2 + 2, "Tf": 1 + 2, "Ab": 2 + 2 * 2 + 1, "Tb": 1 + 1, "Ef": 1 + 2 + 1, "Eb": 1 + 2 + 1, "Ew": 1}
    for kind, count in ticks.items():
        op, phase = kind.replace("T", "A")
        layers = {"T": [2], "A": [0, 1], "E": [0]}[kind[0]]
        estimate = sum(costs.actions[op, layer, phase].seconds for layer in layers)  # type: ignore[index]
        assert scales[kind].seconds(estimate) == pytest.approx(tick * count), kind
    assert set(scales) == {*ticks, "O"}


def test_split_backward_is_measured_as_such() -> None:
    scales = calibrated(on_meta(), ticking(1.0), replace(CHOICES, split_attention=True)).device.scales
    assert {"Ab", "Aw", "Tb", "Tw"} < set(scales)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_architectures(name: str) -> None:
    """Dense first layers, shared experts, windows and biases."""
    assert calibrated(on_meta(name), ticking(1.0)).device.scales["Af"].factor > 0


def test_nothing_of_the_user_changes() -> None:
    lazy, model = on_meta(), tiny_hf("qwen3_moe").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    calibrated(model, ticking(1.0))
    calibrated(lazy, ticking(1.0))
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(tensor.is_meta for tensor in lazy.parameters())
    assert not model.training


def test_the_sample_is_small_and_like_the_model() -> None:
    model = on_meta("deepseek_v3")
    sample = sample_of(model, torch.bfloat16, CPU)
    assert len(sample.layers) == 2 and len(sample.shape.layers) == 2
    assert len(sample.whole.layers) == model.config.num_hidden_layers > 2  # type: ignore[union-attr]
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in sample.model.parameters())


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(PlanError, match="contains 0 transformers models"):
        calibrated(tiny(), ticking(1.0))


# -- links ------------------------------------------------------------------------------------------------------------


class KnownLink:
    """The end that begins; its peer answers as soon as it has everything. Time passes while it waits."""

    def __init__(self, link: Link) -> None:
        self._link, self.seconds = link, 0.0
        self._posted: list[int] = []

    def post(self, peer: int, nbytes: int) -> Any:
        self._posted.append(nbytes)
        return self

    def send(self, peer: int, message: torch.Tensor) -> Any:
        return self

    def wait(self) -> None:
        if self._posted:
            way = self._link.latency + self._link.busy_seconds(sum(self._posted), len(self._posted))
            self.seconds += 2 * way
            self._posted.clear()


def test_a_link_is_measured() -> None:
    mail = KnownLink(Link(gb_per_s=2.5, efficiency=1.0, latency_us=40.0, half_kib=30.0))
    samples = measure_pair(mail, 0, 1, CPU, lambda: mail.seconds)
    found = fit_link(samples)
    assert {sample.messages for sample in samples} == set(COUNTS)
    assert (found.gb_per_s, found.latency_us, found.half_kib) == pytest.approx((2.5, 40.0, 30.0))


class Noting:
    """Mail that writes down what it is asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def post(self, peer: int, nbytes: int) -> Any:
        self.log.append("post")
        return self

    def send(self, peer: int, message: torch.Tensor) -> Any:
        self.log.append("send")
        return self

    def wait(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize(
    ("device", "rank", "order"),
    [
        ("cpu", 0, "post send wait wait"),
        ("cpu", 1, "post wait send wait"),
        ("meta", 0, "send post wait wait"),
        ("meta", 1, "post wait send wait"),
    ],
)
def test_devices_with_queues_get_messages_in_the_order_of_their_travel(device: str, rank: int, order: str) -> None:
    """On a GPU a receive that is posted before a send to the same rank would hold that up."""
    mail = Noting()
    measure_pair(mail, rank, 1 - rank, torch.device(device), lambda: 0.0)
    assert mail.log[:4] == order.split()


class Working:
    """A process whose clock runs on by a millisecond for each message that is sent or comes."""

    def __init__(self, per_byte: float) -> None:
        self.per_byte, self.seconds = per_byte, 0.0

    def post(self, peer: int, nbytes: int) -> Any:
        self.seconds += 1e-3 + self.per_byte * nbytes
        return self

    def send(self, peer: int, message: torch.Tensor) -> Any:
        return self.post(peer, message.numel())

    def wait(self) -> None:
        """Nothing to do."""


def test_what_messages_take_of_a_core_is_measured() -> None:
    """Receives are offered before the clock is read, so that here half of the messages count."""
    mail = Working(per_byte=1e-9)
    found = measure_handling(mail, 1, lambda: mail.seconds)
    assert [one.nbytes for one in found] == list(HANDLED)
    assert [one.seconds for one in found] == pytest.approx([(1e-3 + 1e-9 * n) / 2 for n in HANDLED])


@pytest.mark.parametrize("nodes", [(0,), (0, 0), (0, 0, 0), (0, 0, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2, 2)])
def test_pairs(nodes: tuple[int, ...]) -> None:
    """Both of a pair mean each other, so that nobody waits for a message that is never sent."""
    for peer_of, same in ((near_peer, True), (far_peer, False)):
        pairs = {rank: peer_of(nodes, rank) for rank in range(len(nodes))}
        for rank, peer in pairs.items():
            assert peer is None or (pairs[peer] == rank and (nodes[rank] == nodes[peer]) is same)
        lonely = sum(peer is None for peer in pairs.values())
        size = nodes.count(0)
        assert lonely == ((size % 2) * len(set(nodes)) if same else (len(set(nodes)) % 2) * size)


# -- ranks ------------------------------------------------------------------------------------------------------------


def calibrate_together() -> dict[str, Any]:
    dist.init_process_group("gloo")
    ranks = RankLinks.over_default_group((0, 0), CPU)
    found = calibrate(
        on_meta(),
        BATCH,
        replace(named_cluster("local"), devices_per_node=2),
        ranks,
        budget_seconds=0.1,
        progress=lambda text, share: None,
        choices=CHOICES,
    )
    plan = choose(found.request(4), Effort())
    return {**found.cluster.as_dict(), "layout": plan.best.layout.describe()}


def test_ranks_agree_and_can_plan(pool: RankPool) -> None:
    first, second = pool.run(calibrate_together, 2)
    base = named_cluster("local").as_dict()
    assert first == second
    handling = {name: first["nvlink"][name] for name in ("host_us", "host_us_per_mib")}
    assert max(handling.values()) > 0
    assert first["nvlink"] != {**base["nvlink"], **handling} and first["nic"] == {**base["nic"], **handling}
    assert first["layout"] == "1A + 1F"
