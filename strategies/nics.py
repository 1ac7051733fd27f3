"""Which NICs a rank uses: said to NCCL and gloo by environment variables, before any process group exists."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_afd.namespace import MisconfigurationException
from lightning_afd.nics import SYSFS, NicShares, divide_nics, infiniband_devices, interfaces
from lightning_afd.placement import Role

NicsOfRoles = Mapping[str, Sequence[str]]
"""Names of the NICs of A and of F ranks, on every node."""
ANYWHERE = "192.0.2.1"
"""An address outside of every network (RFC 5737): the way there is the default route. Nothing is sent."""
SIOCGIFADDR = 0x8915
"""Linux' question for the address of an interface."""
IB, SOCKETS, GLOO = "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of one node, as one of them sees it."""

    roles: tuple[Role, ...]
    """By local rank."""
    local_rank: int
    sysfs: Path = SYSFS

    def divided(self, shares: NicShares, backend: str) -> tuple[str, ...]:
        """NICs of this rank: all of the fastest kind that the backend can use, in proportion to the node's shares."""
        names = (infiniband_devices(self.sysfs) if "nccl" in backend else []) or interfaces(self.sysfs)
        if not names:
            return ()
        return divide_nics(names, [shares.of(role) for role in self.roles])[self.local_rank]

    def named(self, nics: NicsOfRoles) -> tuple[str, ...]:
        """NICs of this rank among those of its role; raises MisconfigurationException for ones that are not there."""
        role = self.roles[self.local_rank]
        present = {*infiniband_devices(self.sysfs), *interfaces(self.sysfs)}
        if missing := [name for name in nics.get(role, ()) if name not in present]:
            raise MisconfigurationException(
                f"nics: {', '.join(missing)} of {role} ranks is no NIC that is up on {socket.gethostname()}, "
                f"which has {', '.join(sorted(present)) or 'none'}"
            )
        if not nics.get(role):
            return ()
        alike = [rank for rank, other in enumerate(self.roles) if other == role]
        return divide_nics(nics[role], [1.0] * len(alike))[alike.index(self.local_rank)]


def wanted_nics(
    option: NicsOfRoles | str | None, shares: NicShares | None, node: NodeRanks, backend: str
) -> tuple[str, ...]:
    """The NICs of this rank by option and plan; none where the library is to choose.

    It does so, too, where the plan gives ranks of both roles the same: it knows which NIC is near to which device.
    """
    if isinstance(option, Mapping):
        return node.named(option)
    if option is None or shares is None or shares.attention == shares.ffn:
        return ()
    return node.divided(shares, backend)


def apply_nics(
    names: Sequence[str], node: NodeRanks, backend: str, environment: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Tell the backend of this process its NICs; returns those that it now uses by our word.

    A variable that the user has set stays, and a line says so. NCCL takes all of them. gloo takes the first one: it
    could use several in turn, but only as many on every rank; and it has no use for InfiniBand devices.
    """
    variable, taken = _variable(names, node, backend)
    if not taken:
        return ()
    value = ("=" if "nccl" in backend else "") + ",".join(taken)
    theirs = environment.setdefault(variable, value)
    if theirs != value:
        rank_zero_info(f"{variable}={theirs} is set: it holds, instead of {value}")
        return ()
    return taken


def _variable(names: Sequence[str], node: NodeRanks, backend: str) -> tuple[str, tuple[str, ...]]:
    """Where the names go, and which of them: of both kinds, InfiniBand devices for NCCL, interfaces for gloo."""
    devices = infiniband_devices(node.sysfs)
    fast = tuple(name for name in names if name in devices)
    others = tuple(name for name in names if name not in devices)
    if "nccl" not in backend:
        return GLOO, others[:1]
    return (IB, fast) if fast else (SOCKETS, others)


def make_reachable(first_host: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Give gloo the interface towards the job's first host where this host's name would lead others to themselves.

    gloo announces the address of the host's name. Where that is 127.0.0.1, as many systems have it in /etc/hosts, a
    rank of another host connects to itself and waits until it gives up.
    """
    if environment.get(GLOO) or not _is_local(_address_of(socket.gethostname())):
        return
    ways = (_interface_towards(address) for address in (first_host, ANYWHERE))
    if way := next(filter(None, ways), None):
        environment[GLOO] = way
        rank_zero_info(f"{socket.gethostname()} is a loopback address here: ranks are reached by {way} ({GLOO})")


def _address_of(host: str) -> str:
    """Empty where the name is not known, which to gloo is the same as loopback."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _is_local(address: str) -> bool:
    return not address or address.startswith("127.")


def _interface_towards(host: str) -> str | None:
    """The interface by which packets to a host leave; that of its address where it is this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing, but chooses a way
        except OSError:
            return None
        own = probe.getsockname()[0]
        names = (name for _, name in socket.if_nameindex() if _has_address(probe, name, own))
        return None if _is_local(own) else next(names, None)


def _has_address(probe: socket.socket, interface: str, address: str) -> bool:
    try:
        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:
        return False
    return socket.inet_ntoa(answer[20:24]) == address


def checked_nics(nics: object) -> None:
    """Raise MisconfigurationException for an option that is neither "auto", None nor names by role."""
    if nics in ("auto", None):
        return
    if not isinstance(nics, Mapping) or not nics or not set(nics) <= {"A", "F"}:
        raise MisconfigurationException(
            f"nics={nics!r}: choose 'auto', None, or names by role, "
            "for example nics={'A': ['mlx5_0'], 'F': ['mlx5_1']}"
        )
