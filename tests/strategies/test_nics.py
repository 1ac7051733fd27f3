"""Which NICs a rank tells NCCL and gloo to use, and what users have set themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sysfs import Sysfs

from lightning_afd import AFDStrategy
from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.allocate.choose import Effort, choose
from lightning_afd.allocate.request import Request
from lightning_afd.cost.job import BatchShape
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.nics import NicShares
from lightning_afd.placement import Layout
from lightning_afd.recipes.shapes import named_cluster, named_model
from lightning_afd.strategies import nics
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.nics import NodeRanks, apply_nics, wanted_nics

UNEQUAL = NicShares(attention=0.5, ffn=1.5)


@pytest.fixture
def host(tmp_path: Path) -> Sysfs:
    """Four InfiniBand devices and two interfaces."""
    made = Sysfs(tmp_path)
    for n in range(4):
        made.infiniband(f"mlx5_{n}")
    for n in range(2):
        made.interface(f"eth{n}", hardware=True)
    return made


def node(host: Sysfs, local_rank: int, roles: str = "AAFF") -> NodeRanks:
    return NodeRanks(roles=tuple(roles), local_rank=local_rank, sysfs=host.root)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("local_rank", "names", "value"),
    [(0, ("mlx5_0",), "=mlx5_0"), (1, ("mlx5_0",), "=mlx5_0"), (2, ("mlx5_1", "mlx5_2"), "=mlx5_1,mlx5_2")],
)
def test_nccl_gets_the_devices_of_the_plan(host: Sysfs, local_rank: int, names: Any, value: str) -> None:
    environment: dict[str, str] = {}
    rank = node(host, local_rank)
    assert apply_nics(wanted_nics("auto", UNEQUAL, rank, "nccl"), rank, "nccl", environment) == names
    assert environment == {"NCCL_IB_HCA": value}


def test_hosts_without_infiniband_use_sockets(tmp_path: Path) -> None:
    plain = Sysfs(tmp_path)
    for n in range(2):
        plain.interface(f"eth{n}", hardware=True)
    rank, environment = node(plain, 1, "AF"), dict[str, str]()
    assert apply_nics(
        wanted_nics("auto", UNEQUAL, rank, "cpu:gloo,cuda:nccl"), rank, "cpu:gloo,cuda:nccl", environment
    ) == ("eth1", "eth0")
    assert environment == {"NCCL_SOCKET_IFNAME": "=eth1,eth0"}
    environment = {}
    assert apply_nics(wanted_nics("auto", UNEQUAL, rank, "gloo"), rank, "gloo", environment) == ("eth1",)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1"}


@pytest.mark.parametrize(
    ("option", "shares"),
    [(None, UNEQUAL), ("auto", None), ("auto", NicShares(attention=2, ffn=2)), ({"F": ["eth0"]}, None)],
)
def test_the_library_chooses_where_nothing_is_wanted(host: Sysfs, option: Any, shares: NicShares | None) -> None:
    environment: dict[str, str] = {}
    rank = node(host, 0)
    assert apply_nics(wanted_nics(option, shares, rank, "nccl"), rank, "nccl", environment) == ()
    assert not environment


def test_gloo_has_no_use_for_infiniband(host: Sysfs) -> None:
    rank, environment = node(host, 3), dict[str, str]()
    assert apply_nics(wanted_nics("auto", UNEQUAL, rank, "gloo"), rank, "gloo", environment) == ("eth1",)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1"}
    environment = {}
    mixed = wanted_nics({"F": ["mlx5_0", "eth0"]}, None, node(host, 1, "AF"), "gloo")
    assert apply_nics(mixed, rank, "gloo", environment) == ("eth0",)
    assert apply_nics(mixed, rank, "nccl", environment) == ("mlx5_0",)
    assert apply_nics(("mlx5_0",), rank, "gloo", environment) == ()


def test_names_of_a_role_are_divided_over_its_ranks(host: Sysfs) -> None:
    option = {"A": ["mlx5_3"], "F": ["mlx5_0", "mlx5_1"]}
    assert [wanted_nics(option, None, node(host, rank), "nccl") for rank in range(4)] == [
        *(("mlx5_3",), ("mlx5_3",)),
        *(("mlx5_0",), ("mlx5_1",)),
    ]


def test_a_name_that_is_not_there_is_refused(host: Sysfs) -> None:
    host.infiniband("mlx5_9", up=False)
    with pytest.raises(
        MisconfigurationException, match=r"mlx5_9 of A ranks is no NIC that is up .* has eth0, eth1, mlx5"
    ):
        wanted_nics({"A": ["mlx5_0", "mlx5_9"]}, None, node(host, 0), "nccl")


def test_what_the_user_has_set_holds_and_is_said(host: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(nics, "rank_zero_info", said.append)
    environment = {"NCCL_IB_HCA": "mlx5"}
    rank = node(host, 0)
    assert apply_nics(("mlx5_0",), rank, "nccl", environment) == ()
    assert environment == {"NCCL_IB_HCA": "mlx5"}
    assert said == ["NCCL_IB_HCA=mlx5 is set: it holds, instead of =mlx5_0"]
    environment = {}
    assert apply_nics(("mlx5_0",), rank, "nccl", environment) == apply_nics(("mlx5_0",), rank, "nccl", environment)
    assert len(said) == 1


@pytest.mark.parametrize("value", ["all", {"B": ["eth0"]}, {}, 3])
def test_other_options_are_refused(value: Any) -> None:
    with pytest.raises(MisconfigurationException, match="choose 'auto', None, or names by role"):
        AFDConfig(nics=value)


def test_a_plan_file_says_what_ranks_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layout, too, which the ranks do not follow before they have met."""
    path, seen = tmp_path / "plan.json", list[Any]()
    monkeypatch.setattr(RankedStrategy, "_choose_nics", lambda self, layout: seen.append((layout, self.nic_shares)))
    plan = small_plan(path)
    strategy = AFDStrategy(plan=str(path))
    by_rule = Layout(attention=1, ffn=plan.best.layout.world - 1)
    strategy._choose_nics(by_rule)
    strategy._choose_nics(Layout(attention=90, ffn=1))
    AFDStrategy(plan=str(tmp_path / "none.json"))._choose_nics(by_rule)
    shares = NicShares(attention=0.5, ffn=1.5)
    assert seen == [(plan.best.layout, shares), (Layout(attention=90, ffn=1), shares), (by_rule, None)]


@pytest.mark.parametrize("neighbours", ["roles", "groups"])
def test_roles_are_those_of_the_layout_that_will_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbours: Any
) -> None:
    """Which differs from the plan's where the user says which ranks share a node, and where the plan falls back."""
    path, seen = tmp_path / "plan.json", list[Any]()
    monkeypatch.setattr(RankedStrategy, "_choose_nics", lambda self, layout: seen.append((layout, self.nic_shares)))
    plan = small_plan(path)
    best = plan.best.layout
    assert best.neighbours == "roles"
    AFDStrategy(plan=str(path), neighbours=neighbours)._choose_nics(best)
    replace(plan, verdict=replace(plan.verdict, disaggregate=False)).save(path)
    AFDStrategy(plan=str(path))._choose_nics(best)
    AFDStrategy(plan=str(path), attention=best.attention, neighbours=neighbours)._choose_nics(best)
    trained = replace(best, neighbours=neighbours), NicShares(attention=0.5, ffn=1.5)
    assert seen == [trained, (Layout.together(best.world), None), trained]


def small_plan(path: Path) -> PlanChoice:
    """A plan that gives FFN ranks more NICs."""
    model, cluster = named_model("deepseek_moe_paper"), named_cluster("h800_16x8")
    model, cluster = replace(model, layers=model.layers[:2]), replace(cluster, num_nodes=1, devices_per_node=4)
    request = Request(model=model, cluster=cluster, batch=BatchShape.rows(1, 128), parts=4, groups=(1,))
    plan = choose(request, Effort(layouts=1, predict={}))
    plan = replace(plan, attention_nics=0.5, ffn_nics=1.5)
    plan.save(path)
    return plan
