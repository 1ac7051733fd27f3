"""Which F rank owns which experts of a layer, and which rows of a tensor those are (pure values, no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertMap:
    """Which F rank (index inside its group) owns which expert; any map is allowed, `version` names it on the wire."""

    expert_to_rank: tuple[int, ...]
    """By global expert id: the index of its F rank inside its group."""
    version: int = 0

    @classmethod
    def contiguous(cls, experts: int, ranks: int) -> ExpertMap:
        """Divide experts into contiguous runs whose lengths differ by one at most."""
        sizes = split_sizes(experts, ranks)
        return cls(tuple(rank for rank, size in enumerate(sizes) for _ in range(size)))

    @property
    def experts(self) -> int:
        """E."""
        return len(self.expert_to_rank)

    def rank_to_experts(self, rank: int) -> tuple[int, ...]:
        """Global expert ids of one F rank, ascending; their position is the local id."""
        return tuple(expert for expert, owner in enumerate(self.expert_to_rank) if owner == rank)

    def joined(self, nodes: Sequence[Sequence[int]]) -> ExpertMap:
        """The same with nodes, each several ranks, as owners, by their position."""
        node_of = {rank: position for position, node in enumerate(nodes) for rank in node}
        return ExpertMap(tuple(node_of[owner] for owner in self.expert_to_rank), self.version)

    def within(self, node: Sequence[int]) -> ExpertMap:
        """The experts of some ranks alone, numbered by their local ids in `joined`; owners are positions in `node`."""
        return ExpertMap(tuple(node.index(owner) for owner in self.expert_to_rank if owner in node), self.version)

    def local_ids(self) -> tuple[int, ...]:
        """For each global expert its position among the experts of its owner."""
        seen: dict[int, int] = {}
        ids = []
        for owner in self.expert_to_rank:
            ids.append(seen.get(owner, 0))
            seen[owner] = ids[-1] + 1
        return tuple(ids)


@dataclass(frozen=True)
class ExpertRows:
    """Which rows of a tensor [E, ...] a rank holds: row i of its own tensor belongs to global expert `experts[i]`."""

    experts: tuple[int, ...]
    total: int
    """E, the experts of all ranks together."""

    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first global expert, first own row, length) of each stretch of consecutive experts."""
        runs: list[tuple[int, int, int]] = []
        for row, expert in enumerate(self.experts):
            if runs and expert == runs[-1][0] + runs[-1][2]:
                first, start, length = runs.pop()
                runs.append((first, start, length + 1))
            else:
                runs.append((expert, row, 1))
        return tuple(runs)


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of `parts` consecutive runs of `total` items; the first ones are longer by one."""
    return [total // parts + (part < total % parts) for part in range(parts)]
