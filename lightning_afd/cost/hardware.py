"""A cluster: rates of its devices and links, and how much of them programs reach.

The fields are those of conf/cluster/*.yaml; `Cluster.read` makes one of such a file's content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from lightning_afd.cost.model import Linear
from lightning_afd.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares (0..1) of a device's peak that large calls reach."""

    gemm: float
    grouped_gemm: float
    attention_forward: float
    attention_backward: float
    hbm: float
    """Of the memory bandwidth, in elementwise operations."""
    half_rows: float
    """Rows at which a GEMM reaches half of its own efficiency: r rows reach r / (r + half_rows).

    A kernel computes whole tiles of rows, so that a group of r rows wastes half a tile on average: 64 rows for tiles of
    128 (NVIDIA, Matrix Multiplication Background User's Guide, tile quantization).
    """


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What a kind of action took where it was measured, next to its estimate: fixed + factor x estimate."""

    factor: float
    """Measured over estimated seconds."""
    fixed_us: float = 0.0
    """Microseconds of any action of the kind."""

    def seconds(self, estimate: float) -> float:
        """Of an action whose roofline says `estimate` seconds."""
        return self.fixed_us * 1e-6 + self.factor * estimate


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or one process's share of a CPU)."""

    name: str
    memory_gb: float
    """Decimal gigabytes."""
    usable_memory: float
    """Share of it that is left after the driver's context, communication buffers and fragmentation."""
    peak_tflops: Mapping[str, float]
    """Dense 1e12 FLOP/s by dtype: bfloat16, float32 ..."""
    hbm_gb_per_s: float
    """Memory bandwidth in decimal gigabytes per second."""
    efficiency: Efficiency
    host_us: float
    """An action takes at least so long: the host has to launch its kernels."""
    scales: Mapping[str, Scale] = field(default_factory=lambda: MappingProxyType({}))
    """Measured on the model in question, by kind: Af Ab Aw (attention), Tf Tb Tw (tail), Ef Eb Ew (experts), O (update
    of the optimizer). Kinds that are not there keep their estimate."""

    @property
    def memory_bytes(self) -> float:
        """Bytes that a plan may use."""
        return self.memory_gb * 1e9 * self.usable_memory

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s; raises PlanError for a dtype without one."""
        if dtype not in self.peak_tflops:
            raise PlanError(f"{self.name} has no peak for {dtype}: known are {', '.join(self.peak_tflops)}")
        return self.peak_tflops[dtype] * 1e12

    def gemm_seconds(self, linear: Linear, rows: float, dtype: str, *, groups: float = 0) -> float:
        """One GEMM of `rows` x inputs x outputs, or a grouped one whose rows are spread over `groups` matrices.

        The roofline of Williams et al. (2009): the larger of FLOPs over attained peak and bytes over bandwidth, where
        each matrix is read once and each row read and written once.
        """
        if rows <= 0:
            return 0.0
        share = self.efficiency.grouped_gemm if groups else self.efficiency.gemm
        per_matrix = rows / max(groups, 1)
        attained = self.peak(dtype) * share * per_matrix / (per_matrix + self.efficiency.half_rows)
        moved = max(groups, 1) * linear.inputs * linear.outputs + rows * (linear.inputs + linear.outputs)
        return max(rows * linear.flops / attained, self.memory_seconds(moved * width_of(dtype)))

    def gemms_seconds(self, linears: Iterable[Linear], rows: float, dtype: str, *, groups: float = 0) -> float:
        """Several GEMMs, one after the other."""
        return sum(self.gemm_seconds(linear, rows, dtype, groups=groups) for linear in linears)

    def memory_seconds(self, nbytes: float) -> float:
        """Reading or writing so many bytes in elementwise operations."""
        return nbytes / (self.hbm_gb_per_s * 1e9 * self.efficiency.hbm)

    def action_seconds(self, kind: str, estimate: float) -> float:
        """An action's time: as measured, or what the roofline says but not below what the host needs to launch it."""
        if kind in self.scales:
            return self.scales[kind].seconds(estimate)
        return max(estimate, self.host_us * 1e-6)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One class of links, as one device sees it, in each direction at once (full duplex)."""

    gb_per_s: float
    """Decimal gigabytes per second, per port and direction."""
    efficiency: float
    """Share of it that long messages reach."""
    latency_us: float
    """From the start of a transfer to its first byte."""
    half_kib: float
    """Message size (KiB) that reaches half of that rate: a message of s bytes reaches s / (s + half).

    The n_1/2 of Hockney (Parallel Computing 20, 1994); MegaScale-Infer (2504.02263, section 4.3) measures such a curve.
    """
    host_us: float = 0.0
    """What a message takes of the core of each end, where the cores that compute also move messages (gloo)."""
    host_us_per_mib: float = 0.0
    """The same for each MiB."""

    @property
    def latency(self) -> float:
        """In seconds."""
        return self.latency_us * 1e-6

    def utilisation(self, message_bytes: float) -> float:
        """Share of the long-message rate that messages of this size reach."""
        half = self.half_kib * 1024
        return message_bytes / (message_bytes + half) if message_bytes > 0 else 1.0

    def busy_seconds(self, nbytes: float, messages: float = 1, ports: float = 1.0) -> float:
        """How long `ports` ports are busy with so many bytes in so many equal messages, without latency."""
        if nbytes <= 0:
            return 0.0
        rate = self.gb_per_s * 1e9 * self.efficiency * ports
        return nbytes / (rate * self.utilisation(nbytes / max(messages, 1)))

    def host_seconds(self, nbytes: float, messages: float = 1) -> float:
        """How long the core of one end is busy with so many bytes in so many messages."""
        return 1e-6 * (messages * self.host_us + nbytes / 2**20 * self.host_us_per_mib) if nbytes > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes with equal devices."""

    num_nodes: int
    devices_per_node: int
    device: Device
    nics_per_node: float
    """Shared out evenly among the devices of a node."""
    nic: Link
    """Between nodes."""
    nvlink: Link
    """Between devices of one node."""
    at_once: float = math.inf
    """Ranks of a node that compute at full speed at the same time: fewer than its ranks where they share cores."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node", "nics_per_node", "at_once"):
            if getattr(self, name) <= 0:
                raise PlanError(f"cluster.{name}={getattr(self, name)}: more than 0 is needed")

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.devices_per_node

    @property
    def crowd(self) -> float:
        """How many times as long computations take while all ranks of a node compute."""
        return max(1.0, self.devices_per_node / self.at_once)

    @property
    def ports(self) -> float:
        """NICs of one device where they are shared out evenly."""
        return self.nics_per_node / self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node of a global rank: launchers fill one node after another."""
        return rank // self.devices_per_node

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Cluster:
        """A cluster out of a file of conf/cluster; raises PlanError naming settings that are missing or unknown."""
        values = _checked(cls, content, "cluster")
        device = _checked(Device, values["device"], "cluster.device")
        efficiency = Efficiency(**_checked(Efficiency, device["efficiency"], "cluster.device.efficiency"))
        scales = {kind: Scale(**scale) for kind, scale in device.get("scales", {}).items()}
        nic, nvlink = (Link(**_checked(Link, values[name], f"cluster.{name}")) for name in ("nic", "nvlink"))
        device = {**device, "efficiency": efficiency, "scales": scales}
        return cls(**{**values, "device": Device(**device), "nic": nic, "nvlink": nvlink})

    def as_dict(self) -> dict[str, Any]:
        """Plain values that `read` takes back."""
        scales = {kind: asdict(scale) for kind, scale in self.device.scales.items()}
        device = replace(self.device, scales={})
        found = asdict(replace(self, device=device))
        found["device"]["scales"] = scales
        if math.isinf(self.at_once):
            del found["at_once"]  # the default, which JSON does not know
        return found


def width_of(dtype: str) -> int:
    """Bytes of one number of a dtype."""
    return {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1}[dtype]


def _checked(kind: type[Any], content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The content as a dict, after its keys have been compared with the fields of a dataclass."""
    wanted = {part.name for part in fields(kind)}
    needed = {part.name for part in fields(kind) if part.default is MISSING and part.default_factory is MISSING}
    if missing := sorted(needed - set(content)):
        raise PlanError(f"{place} lacks {', '.join(missing)}")
    if strange := sorted(set(content) - wanted):
        raise PlanError(f"{place} has no setting {', '.join(strange)}; it has {', '.join(sorted(wanted))}")
    return dict(content)
