"""How many ranks and NICs attention and experts of one group get: the question that the MILP answers.

DisagMoE (2605.11005) minimises max(T_a, T_f) over M, N and the NICs of both sides. Here ranks are taken from lists of
sizes that make sense, each with what it achieves: uneven shares, memory and divisibility are then in the lists, and the
problem is linear in the choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_afd.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Size:
    """A number of ranks that a side may have."""

    ranks: int
    capacity: float
    """How many perfectly divided ranks are as fast: experts / ceil(experts / ranks), for example."""
    most_attention: int = 1_000_000
    """Of an FFN side: the most attention ranks whose rows its memory takes."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Seconds per step of all the work of a group, if one rank or NIC did it."""

    attention: float
    ffn: float
    attention_nic: float
    """Rows of dispatch and combine, and base hops where there are several groups."""
    ffn_nic: float


@dataclass(frozen=True, kw_only=True)
class Division:
    """One group of `ranks` ranks, to be divided; all groups are alike."""

    needs: Needs
    attention: tuple[Size, ...]
    """Sizes of the attention side to choose from."""
    ffn: tuple[Size, ...]
    """Sizes of the FFN side to choose from."""
    ranks: int
    nics: int
    """NICs of the group."""
    nics_per_rank: int = 0
    """The NICs that a rank reaches; 0: each side can use any (ranks of both sides on every node, as in the paper)."""

    def __post_init__(self) -> None:
        if not self.attention or not self.ffn:
            raise PlanError("nothing to choose from: no size of the attention or the FFN side fits into memory")
        if self.ranks < 2 or self.nics < 2:
            raise PlanError(f"{self.ranks} ranks and {self.nics} NICs per group: each side needs one of each")

    def seconds(self, attention: Size, ffn: Size, nics: tuple[int, int]) -> float:
        """The step time of a division: the busiest of ranks and NICs."""
        return max(self.busy(attention, ffn, nics))

    def busy(self, attention: Size, ffn: Size, nics: tuple[int, int]) -> tuple[float, float, float, float]:
        """Seconds in which attention, experts and the NICs of both are busy."""
        needs = self.needs
        return (
            needs.attention / attention.capacity,
            needs.ffn / ffn.capacity,
            needs.attention_nic / nics[0],
            needs.ffn_nic / nics[1],
        )

    def allows(self, attention: Size, ffn: Size, nics: tuple[int, int]) -> bool:
        """Whether a division keeps to all limits."""
        own = self.nics_per_rank
        return (
            attention.ranks + ffn.ranks <= self.ranks
            and attention.ranks <= ffn.most_attention
            and sum(nics) <= self.nics
            and (not own or (nics[0] <= own * attention.ranks and nics[1] <= own * ffn.ranks))
        )


@dataclass(frozen=True, kw_only=True)
class Split:
    """A division that was found."""

    attention: int
    ffn: int
    attention_nics: int
    ffn_nics: int
    seconds: float
    """Busy seconds per step of the busiest part."""


def attention_sizes(sequences: int, most: int, least: int = 1) -> tuple[Size, ...]:
    """Attention ranks for a number of equal micro-batches per step: the fewest for each count per rank."""
    return tuple(
        Size(ranks=ranks, capacity=sequences / -(-sequences // ranks)) for ranks in _fewest(sequences, most, least)
    )


def ffn_sizes(experts: int, most: int) -> tuple[Size, ...]:
    """FFN ranks for a number of experts: the fewest for each number of experts on the fullest rank."""
    return tuple(Size(ranks=ranks, capacity=experts / -(-experts // ranks)) for ranks in _fewest(experts, most, 1))


def _fewest(total: int, most: int, least: int) -> Iterable[int]:
    """The smallest number of parts for each size of the largest part, ascending."""
    seen: set[int] = set()
    for parts in range(max(1, least), min(most, total) + 1):
        largest = -(-total // parts)
        if largest not in seen:
            seen.add(largest)
            yield parts
