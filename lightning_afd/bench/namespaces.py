"""Hosts on one machine: network namespaces joined by links of a chosen rate (Linux, root, iproute2).

NIC n of every host is plugged into switch n, a bridge, and reaches the n-th NICs of all others. A rate holds in each
direction of a cable: tbf limits what the host sends at the host's end and what it receives at the switch's end. Only
rates can be had: no latency, no losses. Hosts share the machine's name, cores, disks and clock.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from lightning_afd.errors import PlanError

PREFIX = "afdnet"
"""Names of namespaces: PREFIX-owner's process-its start-number-part."""
TBF = ("burst", "256kb", "latency", "50ms")
"""A burst takes any packet that a host puts together (64 KiB) and still keeps the mean rate within a few ms."""
PORT = 29500
"""A port that is free on every host, as nobody else lives there."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One namespace, as if it were a machine."""

    index: int
    namespace: str
    nics: tuple[str, ...]
    """Names of its interfaces: eth0, eth1 ..."""
    addresses: tuple[str, ...]
    """Their IPv4 addresses."""

    def command(self, command: Sequence[str], cores: Sequence[int] = ()) -> list[str]:
        """A command line that runs `command` on this host, on these cores of the machine only, if any are given."""
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        return ["ip", "netns", "exec", self.namespace, *pinned, *command]

    def run(
        self, command: Sequence[str], cores: Sequence[int] = (), **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` on this host."""
        return subprocess.run(self.command(command, cores), **options)

    def start(self, command: Sequence[str], cores: Sequence[int] = (), **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on this host; what still runs when the network is removed is killed."""
        return subprocess.Popen(self.command(command, cores), **options)

    def counters(self, nic: str) -> tuple[int, int]:
        """Bytes that went out of and came into an interface, headers of Ethernet, IP and TCP included."""
        shown = _call("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", nic)
        found = json.loads(shown)[0]["stats64"]
        return found["tx"]["bytes"], found["rx"]["bytes"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts and the switches between them."""

    name: str
    hosts: tuple[Host, ...]

    @property
    def switch(self) -> str:
        """The namespace with the bridges."""
        return f"{self.name}-switch"

    def environment(self, host: Host) -> dict[str, str]:
        """Variables for a rank on `host`: rendezvous on host 0, and the interface that others reach it by.

        All hosts have one name, which says nothing about where they are: addresses and interfaces must be given.
        """
        rendezvous = {"MASTER_ADDR": self.hosts[0].addresses[0], "MASTER_PORT": str(PORT)}
        return rendezvous | {"GLOO_SOCKET_IFNAME": host.nics[0], "NCCL_SOCKET_IFNAME": host.nics[0]}

    def shape(self, rate: float | None, nic: int | None = None, only: Host | None = None) -> None:
        """Limit all links, those of NIC number `nic`, or those of one host only, to `rate` bits per second each way.

        None takes limits off.
        """
        for host in self.hosts if only is None else (only,):
            for n, interface in enumerate(host.nics):
                if nic in (None, n):
                    _limit(host.namespace, interface, rate)
                    _limit(self.switch, _port_of(host.index, n), rate)


@contextmanager
def network(hosts: int, *, nics: int = 1, rate: float | None = None) -> Iterator[Network]:
    """So many hosts with `nics` interfaces each, at `rate` bits per second each way, or unlimited.

    Everything is gone afterwards, processes on the hosts included: after an exception, Ctrl+C and SIGTERM (which ends
    the main thread with SystemExit) at once, after SIGKILL when the next network is made. Raises PlanError where
    namespaces cannot be made.
    """
    if hosts < 1 or nics < 1:
        raise PlanError(f"a network of {hosts} hosts with {nics} NICs each: at least 1 of both is needed")
    check_possible()
    remove_leftovers()
    name = _own_name()
    with _ending_on_sigterm():
        try:
            made = _build(name, hosts, nics)
            made.shape(rate)
            yield made
        finally:
            with _undisturbed():
                _remove(part for part in _namespaces() if part.startswith(f"{name}-"))


def check_possible() -> None:
    """Raise PlanError, with what is missing, where this process cannot make namespaces."""
    if sys.platform != "linux":
        raise PlanError(f"network namespaces need Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise PlanError("network namespaces need root: run this command as root, for example with sudo")
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise PlanError(f"network namespaces need {', '.join(missing)}: install iproute2 and util-linux")


def remove_leftovers() -> None:
    """Remove the networks of owners that were killed."""
    _remove(name for name in _namespaces() if not _owner_lives(name))


def _build(name: str, hosts: int, nics: int) -> Network:
    made = Network(name=name, hosts=tuple(_host(name, index, nics) for index in range(hosts)))
    for namespace in (made.switch, *(host.namespace for host in made.hosts)):
        _call("ip", "netns", "add", namespace)
        _call("ip", "-n", namespace, "link", "set", "lo", "up")
    for n in range(nics):
        _call("ip", "-n", made.switch, "link", "add", f"br{n}", "type", "bridge")
        _call("ip", "-n", made.switch, "link", "set", f"br{n}", "up")
        for host in made.hosts:
            _plug_in(made.switch, host, n)
    return made


def _host(name: str, index: int, nics: int) -> Host:
    return Host(
        index=index,
        namespace=f"{name}-host{index}",
        nics=tuple(f"eth{n}" for n in range(nics)),
        addresses=tuple(f"10.77.{n}.{index + 1}" for n in range(nics)),
    )


def _plug_in(switch: str, host: Host, n: int) -> None:
    """NIC n of a host into switch n."""
    port, nic = _port_of(host.index, n), host.nics[n]
    _call("ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "name", nic, "netns", host.namespace)
    _call("ip", "-n", switch, "link", "set", port, "master", f"br{n}", "up")
    _call("ip", "-n", host.namespace, "addr", "add", f"{host.addresses[n]}/24", "dev", nic)
    _call("ip", "-n", host.namespace, "link", "set", nic, "up")


def _port_of(host: int, n: int) -> str:
    """The switch's end of a cable."""
    return f"h{host}n{n}"


def _limit(namespace: str, interface: str, rate: float | None) -> None:
    on = ("dev", interface, "root")
    if rate is not None:
        _call("tc", "-n", namespace, "qdisc", "replace", *on, "handle", "1:", "tbf", "rate", f"{round(rate)}bit", *TBF)
        return
    present = json.loads(_call("tc", "-n", namespace, "-j", "qdisc", "show", *on))
    if any(qdisc["kind"] == "tbf" for qdisc in present):
        _call("tc", "-n", namespace, "qdisc", "del", *on)


def _own_name() -> str:
    own = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"
    taken = {name.rpartition("-")[0] for name in _namespaces()}
    return next(name for name in (f"{own}-{number}" for number in count()) if name not in taken)


def _namespaces() -> list[str]:
    """All namespaces of this module, of any owner."""
    listed = _call("ip", "-j", "netns", "list") or "[]"
    return [entry["name"] for entry in json.loads(listed) if entry["name"].startswith(f"{PREFIX}-")]


def _owner_lives(name: str) -> bool:
    _, pid, started, *_ = name.split("-")
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """When a process began, in ticks of the machine, as numbers of processes come again; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _remove(namespaces: Iterator[str]) -> None:
    """Processes first: a namespace lives as long as one is in it."""
    for namespace in namespaces:
        try:
            for pid in _call("ip", "netns", "pids", namespace).split():
                _kill(int(pid))
            _call("ip", "netns", "del", namespace)
        except PlanError:
            if namespace in _namespaces():  # else somebody else has removed the same leftover
                raise


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _call(*command: str) -> str:
    """What a command of iproute2 prints; raises PlanError with its own words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PlanError(
            f"`{' '.join(command)}` failed ({done.stderr.strip()}): network namespaces need the rights CAP_NET_ADMIN "
            "and CAP_SYS_ADMIN, which containers often lack"
        )
    return done.stdout


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM becomes an exception of the main thread, so that what was made is removed."""

    def end(*_: Any) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    with _handling({signal.SIGTERM: end}):
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl+C or SIGTERM does not stop the removal, which takes a moment."""
    with _handling({signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}):
        yield


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Other signal handlers for a while; only the main thread can set any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
