"""Network interfaces of a node: which there are, which rank uses which, and what passes them (Linux; no torch)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_afd.errors import PlanError
from lightning_afd.placement import Role

SYSFS = Path("/sys/class")
IB_UNIT = 4
"""InfiniBand counts data in words of so many bytes."""
LOOPBACK = 772
"""Type of an interface by which a host reaches itself only (ARPHRD_LOOPBACK)."""


@dataclass(frozen=True, kw_only=True)
class NicShares:
    """How many NICs a rank of each role gets; a fraction means that ranks share one."""

    attention: float
    ffn: float

    def __post_init__(self) -> None:
        for name in ("attention", "ffn"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} ranks with {getattr(self, name)} NICs each: more than 0 is needed")

    def of(self, role: Role) -> float:
        return self.attention if role == "A" else self.ffn


def divide_nics(nics: Sequence[str], shares: Sequence[float]) -> tuple[tuple[str, ...], ...]:
    """The NICs of each rank of a node, by local rank, most used first; `shares` are in proportion to one another.

    Shares are laid end to end over the NICs of the node, so that neighbours share one where shares are no whole
    numbers, and none is left over.
    """
    if not nics or not shares:
        raise PlanError(f"{len(nics)} NICs cannot be divided between {len(shares)} ranks: 1 of both is needed at least")
    scale = len(nics) / sum(shares)
    found, end = [], 0.0
    for share in shares:
        start, end = end, end + share * scale
        overlaps = {n: min(end, n + 1) - max(start, n) for n in range(len(nics))}
        touched = [n for n, overlap in overlaps.items() if overlap > 1e-6]
        found.append(tuple(nics[n] for n in sorted(touched, key=lambda n: (-round(overlaps[n], 6), n))))
    return tuple(found)


def infiniband_devices(sysfs: Path = SYSFS) -> list[str]:
    """InfiniBand and RoCE devices of this host with a port that is up, `mlx5_2` before `mlx5_10`."""
    ports = (sysfs / "infiniband").glob("*/ports/*/state")
    return sorted({port.parts[-4] for port in ports if "ACTIVE" in port.read_text()}, key=_natural)


def interfaces(sysfs: Path = SYSFS) -> list[str]:
    """Interfaces of this host that are up and lead out of it: no loopback, no bridge, none of its containers' ends.

    Where interfaces of hardware are up, these only; in a container or namespace there is often none.
    """
    up = [folder for folder in (sysfs / "net").glob("*") if _leads_out(folder)]
    hardware = [folder for folder in up if (folder / "device").exists()]
    return sorted((folder.name for folder in hardware or up), key=_natural)


def counters(sysfs: Path = SYSFS) -> dict[str, tuple[int, int]]:
    """Bytes that went out of and came in by each NIC of this host since it started, of all its processes.

    Two small files per NIC are read. RDMA is counted by the InfiniBand device only, not by its interface.
    """
    found = {}
    for folder in (sysfs / "net").glob("*"):
        if _number(folder / "type") != LOOPBACK:
            found[folder.name] = (_number(folder / "statistics/tx_bytes"), _number(folder / "statistics/rx_bytes"))
    for port in (sysfs / "infiniband").glob("*/ports/*/counters"):
        name = port.parts[-4] if port.parts[-2] == "1" else f"{port.parts[-4]}/{port.parts[-2]}"
        found[name] = (IB_UNIT * _number(port / "port_xmit_data"), IB_UNIT * _number(port / "port_rcv_data"))
    return found


def moved(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Bytes out and in between two readings of `counters`, by NIC, of those that moved any."""
    differences = {
        name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in _both(before, after)
    }
    return {name: bytes_ for name, bytes_ in sorted(differences.items()) if max(bytes_) > 0}


def _both(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    return (name for name in after if name in before)


def _leads_out(folder: Path) -> bool:
    is_up = _number(folder / "flags") & 1
    return bool(is_up) and _number(folder / "type") != LOOPBACK and not (folder / "bridge").exists()


def _number(file: Path) -> int:
    """0 where there is none, as for an interface that has just been removed."""
    try:
        return int(file.read_text(), 0)
    except (OSError, ValueError):
        return 0


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers inside of names sort as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
