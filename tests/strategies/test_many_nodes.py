"""Jobs on several hosts, which are network namespaces here: two hosts with two ranks each, against one device.

The ranks are those of the pool, each moved to its host for a job. What differs is what a launcher tells them: torchrun,
SLURM, or Lightning's own. torchrun's agents themselves run once, and their ranks are forks of the pool's processes.
"""

import ctypes
import os
import pickle
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cases import join
from cluster_script import fit
from fits import State, worst
from namespaced import needs_namespaces
from pool import RankPool
from sysfs import Sysfs
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

from lightning_afd.bench.namespaces import Network, network
from lightning_afd.strategies import base
from lightning_afd.strategies.nics import NodeRanks, _address_of, _is_local

pytestmark = needs_namespaces

Result = tuple[list[float], State]
Options = tuple[dict[str, Any], ...]
LAYOUTS: Options = ({"neighbours": "groups"}, {"groups": 2}, {"attention": 3, "ffn": 1, "neighbours": "groups"})
OF_THE_POOL = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"),
)
CLONE_NEWNET = 0x40000000


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Two hosts with two NICs each."""
    with network(2, nics=2) as made:
        yield made


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Result:
    """The same fit on one device."""
    result: Result = pool.run(fit, 1, 1, 1, {})[0]
    return result


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and those and the processes that it starts, on a host."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(file: Any) -> None:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {file.name}")

    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{namespace}") as there:
        enter(there)
        try:
            yield
        finally:
            enter(home)


def on_nics(namespaces: list[str], variables: list[Mapping[str, str]], options: Options, sysfs: Path) -> list[Result]:
    """`on_hosts`, where the NICs of this machine are those in `sysfs`."""
    with patch.object(base, "NodeRanks", partial(NodeRanks, sysfs=sysfs)):
        return on_hosts(namespaces, variables, options)


def on_hosts(namespaces: list[str], variables: list[Mapping[str, str]], options: Options) -> list[Result]:
    """What a rank of the pool does as a rank of a launcher that sets just these variables."""
    rank = int(os.environ["RANK"])
    for name in OF_THE_POOL:
        os.environ.pop(name, None)
    os.environ.update(variables[rank])
    with inside(namespaces[rank // 2]):
        return [fit(2, 2, one) for one in options]


def agent(namespaces: list[str], options: Options) -> list[list[Result]]:
    """A rank of the pool as torchrun on a host, with its command line; results of the ranks of this host."""
    node = int(os.environ["RANK"])
    for name in OF_THE_POOL:
        os.environ.pop(name, None)
    line = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", "--master-addr=10.77.0.1", "--master-port=29501"]
    config, *_ = config_from_args(get_args_parser().parse_args([*line, "script.py"]))
    config.start_method = "fork"  # instead of importing all again
    with inside(namespaces[node]):
        found = elastic_launch(config, fits)(options)
    return [pickle.loads(found[rank]) for rank in sorted(found)]


def fits(options: Options) -> bytes:
    """What each rank of torchrun does."""
    return pickle.dumps([fit(2, 2, one) for one in options])


def torchelastic(rank: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    return {"TORCHELASTIC_RUN_ID": "job", **{name: str(value) for name, value in own.items()}}


def by_hand(rank: int) -> dict[str, str]:
    """Lightning's own environment, all ranks started by the user."""
    return {"NODE_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2)}


def slurm(rank: int) -> dict[str, str]:
    own = {"PROCID": rank, "LOCALID": rank % 2, "NODEID": rank // 2, "NTASKS": 4, "NTASKS_PER_NODE": 2, "NNODES": 2}
    named = {"JOB_NAME": "train", "JOB_ID": "4711", "NODELIST": "10.77.0.1"}
    return {f"SLURM_{name}": str(value) for name, value in (own | named).items()}


@pytest.mark.parametrize(("launcher", "options"), [(torchelastic, LAYOUTS[:2]), (slurm, LAYOUTS[2:])])
def test_two_hosts_train_as_one_device(
    pool: RankPool, net: Network, alone: Result, launcher: Any, options: Options
) -> None:
    before = bytes_out(net)
    ranks = run_on_hosts(pool, net, launcher, options)
    for results in zip(*ranks, strict=True):
        compare(list(results), alone)
    assert all(new > old + 100_000 for new, old in zip(bytes_out(net), before, strict=True))


def test_one_copy_of_a_token_passes_between_hosts(pool: RankPool, net: Network, alone: Result) -> None:
    """All FFN ranks are on one of them, and each token visits both, or (1 of 6) one."""
    moved = []
    for dedup in (True, "node"):
        before = bytes_out(net)
        ranks = run_on_hosts(pool, net, torchelastic, ({"dedup": dedup},))
        compare([results[0] for results in ranks], alone)
        moved.append([new - old for new, old in zip(bytes_out(net), before, strict=True)])
    assert all(once < 0.85 * twice for twice, once in zip(*moved, strict=True))


def test_torchrun_meets_over_the_network(pool: RankPool, net: Network, alone: Result) -> None:
    by_node = pool.run(agent, 2, [host.namespace for host in net.hosts], LAYOUTS[1:2])
    compare([results[0] for results in chain.from_iterable(by_node)], alone)


def test_a_host_whose_name_is_its_loopback_address_is_reached(pool: RankPool, net: Network, alone: Result) -> None:
    """Without the variables that name an interface; this machine's name stands in /etc/hosts, or is unknown."""
    if not _is_local(_address_of(socket.gethostname())):
        pytest.skip("the name of this machine has an address")
    compare([results[0] for results in run_on_hosts(pool, net, by_hand, LAYOUTS[:1], bare=True)], alone)


def test_messages_pass_the_chosen_nic(pool: RankPool, net: Network, alone: Result, tmp_path: Path) -> None:
    """Not the one towards the first host, by which they would go else."""
    other, nic = net.hosts[0].nics
    for name in (other, nic):
        Sysfs(tmp_path).interface(name)
    before = {name: bytes_out(net, name) for name in (nic, other)}
    namespaces = [host.namespace for host in net.hosts]
    options = ({"nics": {"A": [nic], "F": [nic]}},)
    ranks = pool.run(on_nics, 4, namespaces, variables_of(net, by_hand, bare=True), options, tmp_path)
    compare([results[0] for results in ranks], alone)
    sent = {name: min(b - a for a, b in zip(before[name], bytes_out(net, name), strict=True)) for name in before}
    assert sent[nic] > 100_000 and sent[nic] > 3 * sent[other]


def run_on_hosts(
    pool: RankPool, net: Network, launcher: Any, options: Options, *, bare: bool = False
) -> list[list[Result]]:
    """Results by rank; `bare`: without the names of interfaces."""
    return pool.run(
        on_hosts, 4, [host.namespace for host in net.hosts], variables_of(net, launcher, bare=bare), options
    )


def variables_of(net: Network, launcher: Any, *, bare: bool) -> list[dict[str, str]]:
    """By rank."""
    variables = [net.environment(net.hosts[rank // 2]) | launcher(rank) for rank in range(4)]
    return [{k: v for k, v in own.items() if not (bare and k.endswith("_IFNAME"))} for own in variables]


def bytes_out(net: Network, nic: str = "eth0") -> list[int]:
    return [host.counters(nic)[0] for host in net.hosts]


def compare(results: list[Result], alone: Result) -> None:
    losses, want = alone
    for own, _ in results:
        assert own == pytest.approx(losses, rel=1e-12)
    assert worst(join([own for _, own in results]), want)[0] < 1e-10
