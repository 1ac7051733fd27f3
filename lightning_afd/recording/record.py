"""A recorded step: what happened when on every rank, and what explains it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_afd.expert_map import ExpertMap
from lightning_afd.schedule.orders import Knobs
from lightning_afd.schedule.programs import programs_of
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What ran."""

    package: str
    """Version of lightning-afd."""
    torch: str
    """Version of torch."""
    device: str
    """Type or name of the device of rank 0."""
    experts: str
    """How expert products are made: "loop" or "grouped_mm"."""
    transport: str
    """What messages travel over: "gloo", "nccl" or "local"."""
    expert_map: int
    """Version of the expert maps by which rows were routed."""


@dataclass(frozen=True, kw_only=True)
class RankClock:
    """How a rank's times became those of the common clock, which is that of rank 0."""

    host: int = 0
    """Number of the rank's host, by the first rank on it; ranks of one host share one clock."""
    offset: float = 0.0
    """Seconds that were added to the rank's own times."""
    accuracy: float = 0.0
    """By how many seconds the offset may be wrong: no more than that, as no message arrives before it is sent."""
    source: str = "perf_counter"
    """Where times come from: "perf_counter" of the process, or "cuda events" on the device's own stream."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sent to another one on one channel in the whole step, headers included."""

    sender: int
    """Global rank."""
    receiver: int
    """Global rank."""
    channel: str
    """Op and phase, as in "Df"."""
    messages: int
    nbytes: int
    """All messages together."""


@dataclass(frozen=True, slots=True)
class NicTraffic:
    """What passed a NIC of one host, as the host counts: headers of the network and all processes included."""

    rank: int
    """The first rank of the host, which has read its counters."""
    name: str
    """Of the interface, or of the InfiniBand device."""
    out: int
    """Bytes sent."""
    into: int
    """Bytes received."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One training step of all ranks."""

    global_step: int
    """Optimizer steps made, this one included."""
    unix_seconds: float
    """Time of the day on rank 0 when the step was written down."""
    timeline: Timeline
    """Measured, in seconds of the common clock since the first action of any rank; whole nanoseconds."""
    order: str
    """Name of the order that built the schedule."""
    shape: Shape
    knobs: Knobs
    """With order and shape all that a schedule is built from."""
    versions: Versions
    """Of what ran."""
    clocks: tuple[RankClock, ...]
    """By rank."""
    traffic: tuple[Traffic, ...]
    """By sender, receiver and channel."""
    expert_maps: tuple[ExpertMap, ...]
    """Owner of each expert, per MoE layer."""
    tokens_per_expert: tuple[tuple[int, ...], ...]
    """Per MoE layer, summed over all A ranks: a token counts once for each of its experts."""
    loss: float
    """Of the global batch."""
    tokens: int
    """Tokens of all A ranks in the batch."""
    seconds: float
    """Forward and backward of the slowest rank, splitting the batch and agreeing on it included."""
    nics: tuple[NicTraffic, ...] = ()
    """Of all hosts, from the beginning of the batch until its gradients are summed; NICs that moved nothing are left
    out."""

    def schedule(self) -> Schedule:
        """The schedule that was executed, built again."""
        return programs_of(self.timeline.layout, self.order, self.shape, self.knobs).schedule

    def tokens_per_rank(self) -> tuple[tuple[int, ...], ...]:
        """Per MoE layer, (token, expert) pairs of each F rank of the layer's group, by its index."""
        found = []
        for expert_map, tokens in zip(self.expert_maps, self.tokens_per_expert, strict=True):
            sums = [0] * self.timeline.layout.ffn
            for owner, count in zip(expert_map.expert_to_rank, tokens, strict=True):
                sums[owner] += count
            found.append(tuple(sums))
        return tuple(found)
