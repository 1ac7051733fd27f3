"""NICs of a node: found, divided over its ranks, and counted, on a folder like /sys/class."""

from pathlib import Path

import pytest
from sysfs import Sysfs

from lightning_afd.errors import PlanError
from lightning_afd.nics import NicShares, counters, divide_nics, infiniband_devices, interfaces, moved

FOUR = ("n0", "n1", "n2", "n3")


@pytest.mark.parametrize(
    ("nics", "shares", "expected"),
    [
        (FOUR, (1, 1, 1, 1), (("n0",), ("n1",), ("n2",), ("n3",))),
        (FOUR, (0.5, 0.5, 1.5, 1.5), (("n0",), ("n0",), ("n1", "n2"), ("n3", "n2"))),
        (FOUR, (3, 1), (("n0", "n1", "n2"), ("n3",))),
        (FOUR, (6, 2), (("n0", "n1", "n2"), ("n3",))),
        (("n0",), (1, 2, 1), (("n0",), ("n0",), ("n0",))),
        (("n0", "n1"), (1, 1, 1), (("n0",), ("n0", "n1"), ("n1",))),
        (("n0", "n1", "n2"), (0.1,) * 3, (("n0",), ("n1",), ("n2",))),
    ],
)
def test_shares_are_laid_end_to_end(
    nics: tuple[str, ...], shares: tuple[float, ...], expected: tuple[tuple[str, ...], ...]
) -> None:
    assert divide_nics(nics, shares) == expected


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_rank_has_a_nic_and_every_nic_a_rank(ranks: int, count: int) -> None:
    nics = [f"n{n}" for n in range(count)]
    divided = divide_nics(nics, [1.5 if rank % 3 else 0.3 for rank in range(ranks)])
    assert len(divided) == ranks and all(divided)
    assert {name for names in divided for name in names} == set(nics)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(PlanError, match="0 NICs cannot be divided between 2 ranks"):
        divide_nics([], [1, 1])
    with pytest.raises(PlanError, match="ffn ranks with 0 NICs each"):
        NicShares(attention=1, ffn=0)


def test_nics_of_a_host_are_found_by_kind(tmp_path: Path) -> None:
    host = Sysfs(tmp_path)
    host.interface("lo", kind=772)
    host.interface("veth0")
    assert interfaces(tmp_path) == ["veth0"] and infiniband_devices(tmp_path) == []
    for name in ("eth10", "eth2"):
        host.interface(name, hardware=True)
    host.interface("eth3", up=False, hardware=True)
    host.interface("br0", bridge=True, hardware=True)
    assert interfaces(tmp_path) == ["eth2", "eth10"]
    for name in ("mlx5_10", "mlx5_2"):
        host.infiniband(name)
    host.infiniband("mlx5_3", up=False)
    assert infiniband_devices(tmp_path) == ["mlx5_2", "mlx5_10"]


def test_bytes_between_two_readings(tmp_path: Path) -> None:
    host = Sysfs(tmp_path)
    host.interface("lo", kind=772, out=5)
    host.interface("eth0", out=1000, into=50)
    host.interface("eth1", out=7, into=8)
    host.infiniband("mlx5_0", out=100, into=200)
    before = counters(tmp_path)
    assert before == {"eth0": (1000, 50), "eth1": (7, 8), "mlx5_0": (400, 800)}
    host.interface("eth0", out=1500, into=60)
    host.infiniband("mlx5_0", out=110, into=200)
    host.interface("eth9", out=1)  # was plugged in meanwhile
    assert moved(before, counters(tmp_path)) == {"eth0": (500, 10), "mlx5_0": (40, 0)}
    assert counters(tmp_path / "nowhere") == {}
