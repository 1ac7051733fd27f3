"""Hosts as namespaces: they reach each other, links have their rates, and nothing is left however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from namespaced import needs_namespaces

from lightning_afd.bench import namespaces
from lightning_afd.bench.namespaces import Host, network
from lightning_afd.errors import PlanError

ROOT = Path(__file__).resolve().parents[2]

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, address = server.accept()
    peer.sendall(b"hello " + address[0].encode())
"""
LISTEN = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2]))).recv(100).decode())"
OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from lightning_afd.bench.namespaces import network
with network(2) as net:
    child = net.hosts[1].start(["sleep", "1000"])
    print(net.name, child.pid, flush=True)
    sys.stdin.read()
"""


def talk(here: Host, there: Host, nic: int) -> str:
    """A connection from one host to an address of another one."""
    with there.start([sys.executable, "-c", ECHO, there.addresses[nic]], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = here.run([sys.executable, "-c", LISTEN, there.addresses[nic], port], stdout=subprocess.PIPE, text=True)
    return client.stdout.strip()


def names_of(name: str) -> list[str]:
    return [found for found in namespaces._namespaces() if found.startswith(name)]


def rates(namespace: str) -> dict[str, float]:
    """Bits per second that tbf was told, by interface."""
    shown = subprocess.run(["tc", "-n", namespace, "-j", "qdisc", "show"], capture_output=True, check=True).stdout
    return {q["dev"]: q["options"]["rate"] * 8 for q in json.loads(shown) if q["kind"] == "tbf"}


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_namespaces
def test_hosts_reach_each_other_over_each_of_their_nics() -> None:
    with network(3, nics=2) as net:
        first, _, third = net.hosts
        assert talk(first, third, 0) == "hello 10.77.0.1"
        before = first.counters("eth1")
        assert talk(first, third, 1) == "hello 10.77.1.1"
        assert all(after > earlier for after, earlier in zip(first.counters("eth1"), before, strict=True))
        assert net.environment(third)["MASTER_ADDR"] == first.addresses[0]
    assert not names_of(net.name)


@needs_namespaces
def test_rates_hold_at_both_ends_of_a_cable_and_can_be_changed() -> None:
    with network(2, nics=2, rate=500e6) as net:
        assert rates(net.hosts[1].namespace) == {"eth0": 500e6, "eth1": 500e6}
        assert set(rates(net.switch).values()) == {500e6} and len(rates(net.switch)) == 4
        net.shape(250e6, nic=1)
        assert rates(net.hosts[0].namespace) == {"eth0": 500e6, "eth1": 250e6}
        net.shape(None)
        net.shape(None)
        assert not rates(net.hosts[0].namespace) and not rates(net.switch)


@needs_namespaces
def test_a_process_is_pinned_to_its_cores() -> None:
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    with network(1) as net:
        done = net.hosts[0].run([sys.executable, "-c", show], cores=[0], stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == "[0]"


@needs_namespaces
def test_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="boom"):
        with network(2) as net:
            child = net.hosts[0].start(["sleep", "1000"])
            raise ValueError("boom")
    assert child.wait(10) == -signal.SIGKILL and not names_of(net.name)


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_leaves_nothing_behind(number: signal.Signals) -> None:
    with start_owner() as owner:
        name, child = told_by(owner)
        assert len(names_of(name)) == 3 and is_running(child)
        owner.send_signal(number)
        assert owner.wait(20) != 0
    assert not names_of(name) and not is_running(child)


@needs_namespaces
def test_what_a_killed_owner_left_is_removed_by_the_next_one() -> None:
    with start_owner() as owner:
        name, child = told_by(owner)
        owner.kill()
    assert len(names_of(name)) == 3 and is_running(child)
    with network(1):
        assert not names_of(name) and not is_running(child)


@needs_namespaces
def test_two_networks_at_once() -> None:
    with network(1) as one, network(1) as other:
        assert one.name != other.name
        namespaces.remove_leftovers()
        assert names_of(one.name) and names_of(other.name)


def test_what_is_missing_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(PlanError, match="need tc: install iproute2"):
        namespaces.check_possible()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PlanError, match="need root"), network(2):
        pass
    with pytest.raises(PlanError, match="0 hosts"), network(0):
        pass


def start_owner() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def told_by(owner: subprocess.Popen[str]) -> tuple[str, int]:
    """The name of its network and a process on one of its hosts."""
    assert owner.stdout is not None
    name, child = owner.stdout.readline().split()
    return name, int(child)
