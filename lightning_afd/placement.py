"""Who is who: ranks to roles, workers to ranks, experts to F ranks (pure values, no torch)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from lightning_afd.errors import PlanError

Role = Literal["A", "F"]
ROLES: tuple[Role, Role] = ("A", "F")
Head = Literal["attention", "ffn"]
"""Whose ranks run the tail of the user's step: what lies behind the last MoE layer (norm, head, loss)."""
HEADS: tuple[Head, ...] = ("attention", "ffn")
Neighbours = Literal["roles", "groups"]
"""Which ranks have consecutive numbers, and so mostly one node: those of a role, or both roles of a group in turn."""
NEIGHBOURS: tuple[Neighbours, ...] = ("roles", "groups")
Sharding = Literal["none", "torch", "deepspeed"]
"""How ranks with the same dense parameters divide their optimizer state: by torch's or DeepSpeed's ZeRO stage 1."""
SHARDINGS: tuple[Sharding, ...] = ("none", "torch", "deepspeed")


@dataclass(frozen=True, order=True, slots=True)
class Worker:
    """A group of ranks that run the same program: `A0` is attention group 0, `F1` expert group 1."""

    role: Role
    group: int

    def __str__(self) -> str:
        return f"{self.role}{self.group}"

    @classmethod
    def parse(cls, name: str) -> Worker:
        """Read `str(worker)` back; raises ValueError for anything else."""
        match = re.fullmatch(r"([AF])(\d+)", name)
        if match is None:
            raise ValueError(f"{name!r} is no worker: expected a role A or F and a group number, as in A0 or F1")
        return cls("A" if match[1] == "A" else "F", int(match[2]))


Groups = int | tuple[int, int]
"""Groups of layers: of each role, or (attention, ffn) where these differ."""


def as_groups(value: Any) -> Groups:
    """Read numbers of groups: an integer, a pair (a list in YAML and JSON), or either of them as text ("2,1").

    A pair of equal numbers becomes the number; raises PlanError for anything else.
    """
    parts = value.strip("[( )]").split(",") if isinstance(value, str) else value
    numbers = tuple(parts) if isinstance(parts, Sequence) else (parts,)
    numbers = tuple(int(n) if isinstance(n, str) and n.strip().isdecimal() else n for n in numbers)
    if len(numbers) not in (1, 2) or not all(type(number) is int for number in numbers):
        raise PlanError(f"groups={value!r}: give one number for both roles, or a pair (attention groups, ffn groups)")
    if min(numbers) < 1:
        raise PlanError(f"groups={value}: at least 1 is needed")
    return numbers[0] if numbers[0] == numbers[-1] else (numbers[0], numbers[-1])


class Grouped:
    """What is cut into `groups`: group g of n of a role owns the MoE layers l with l mod n == g."""

    groups: Groups

    @property
    def attention_groups(self) -> int:
        return self.groups if isinstance(self.groups, int) else self.groups[0]

    @property
    def ffn_groups(self) -> int:
        return self.groups if isinstance(self.groups, int) else self.groups[1]

    @property
    def depth(self) -> int:
        """Groups of each role, for rules that hold only where both have as many; raises PlanError otherwise."""
        if not isinstance(self.groups, int):
            raise PlanError(
                f"groups={self.groups}: costs and plans are known for as many attention groups as ffn groups, "
                f"so use groups={self.groups[0]} or groups={self.groups[1]} there"
            )
        return self.groups

    def workers(self) -> tuple[Worker, ...]:
        """All A groups, then all F groups."""
        attention = (Worker("A", group) for group in range(self.attention_groups))
        return (*attention, *(Worker("F", group) for group in range(self.ffn_groups)))


def tail_worker(head: Head, ffn_groups: int) -> Worker:
    """Who runs the tail: A group 0, or the last F group, which never has more MoE layers than another."""
    return Worker("A", 0) if head == "attention" else Worker("F", ffn_groups - 1)


@dataclass(frozen=True, kw_only=True)
class Layout(Grouped):
    """How the world is divided: `groups` times (`attention` A ranks + `ffn` F ranks), or a pair of `groups`, (a, f):
    a times `attention` A ranks + f times `ffn` F ranks.

    Rank 0, which owns loggers and progress bars, is the first A rank. Launchers number the ranks of one node after
    those of another, so that `neighbours` says which share a node: all A ranks come before all F ranks, or group 0,
    with both roles in turn, comes before group 1. In a collocated layout each rank is both: A rank r of the A group and
    F rank r of the F group.
    """

    attention: int
    """A ranks per A group (M): data-parallel replicas."""
    ffn: int
    """F ranks per F group (N): experts are divided over them."""
    groups: Groups = 1
    """Interleaved groups of each role (p), or (attention, ffn)."""
    head: Head = "attention"
    """Role of the ranks that run the tail."""
    collocated: bool = False
    """Whether the A group and the F group are the same ranks."""
    neighbours: Neighbours = "roles"
    """Which ranks have consecutive numbers."""
    node_ranks: int = 1
    """Consecutive ranks on one node, inside of which F ranks spread the one copy of a token that comes; 1: each gets
    its own."""

    @classmethod
    def together(cls, ranks: int) -> Layout:
        """The collocated layout of so many ranks."""
        return cls(attention=ranks, ffn=ranks, collocated=True)

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise PlanError(f"head={self.head!r}: choose one of {', '.join(HEADS)}")
        if self.neighbours not in NEIGHBOURS:
            raise PlanError(f"neighbours={self.neighbours!r}: choose one of {', '.join(NEIGHBOURS)}")
        object.__setattr__(self, "groups", as_groups(self.groups))
        for name in ("attention", "ffn", "node_ranks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.collocated:
            self._check_collocated()

    def _check_collocated(self) -> None:
        """Raise PlanError for what makes no sense where every rank has all attention and a share of the experts."""
        if self.attention != self.ffn:
            raise PlanError(
                f"a collocated layout with attention={self.attention} and ffn={self.ffn}: its ranks have both roles, "
                "so use the same number"
            )
        for name, only in (("groups", 1), ("head", "attention"), ("neighbours", "roles"), ("node_ranks", 1)):
            if getattr(self, name) != only:
                raise PlanError(
                    f"a collocated layout cannot have {name}={getattr(self, name)!r}, as each of its ranks holds all "
                    f"attention and the head: use {name}={only!r}, or attention and experts on separate ranks"
                )

    @property
    def world(self) -> int:
        """Ranks in all."""
        apart = self.attention_groups * self.attention + self.ffn_groups * self.ffn
        return self.attention if self.collocated else apart

    def ranks_of(self, worker: Worker) -> Sequence[int]:
        """Global ranks of a worker group, in the order of their index and of their numbers."""
        if self.neighbours == "groups":
            return self._mixed[worker]
        size = self.attention if worker.role == "A" else self.ffn
        before = 0 if worker.role == "A" or self.collocated else self.attention_groups * self.attention
        start = worker.group * size + before
        return range(start, start + size)

    @cached_property
    def _mixed(self) -> dict[Worker, tuple[int, ...]]:
        """Ranks by worker where those of a group are neighbours: roles take turns, in proportion in every stretch."""
        found: dict[Worker, list[int]] = {worker: [] for worker in self.workers()}
        before = 0
        for group in range(max(self.attention_groups, self.ffn_groups)):
            a, f = Worker("A", group), Worker("F", group)
            attention, ffn = self.attention * (a in found), self.ffn * (f in found)
            both = attention + ffn
            for place in range(both):
                is_attention = -(-(place + 1) * attention // both) > -(-place * attention // both)
                found[a if is_attention else f].append(before + place)
            before += both
        return {worker: tuple(ranks) for worker, ranks in found.items()}

    @cached_property
    def nodes(self) -> dict[Worker, tuple[tuple[int, ...], ...]]:
        """Places of ranks inside their group, by group and node."""
        return {worker: tuple(self._nodes(worker)) for worker in self.workers()}

    def _nodes(self, worker: Worker) -> Iterator[tuple[int, ...]]:
        ranks = self.ranks_of(worker)
        for _, places in groupby(range(len(ranks)), key=lambda place: ranks[place] // self.node_ranks):
            yield tuple(places)

    @property
    def spreads(self) -> bool:
        """Whether any F rank shares its node with others of its group, to which it sends on what comes."""
        return any(len(node) > 1 for worker, nodes in self.nodes.items() if worker.role == "F" for node in nodes)

    def workers_of(self, rank: int) -> tuple[Worker, ...]:
        """The groups that a global rank belongs to: one, or both of a collocated layout."""
        found = tuple(worker for worker in self.workers() if rank in self.ranks_of(worker))
        if not found:
            raise PlanError(f"rank {rank} is outside of the layout's {self.world} ranks")
        return found

    def worker_of(self, rank: int) -> Worker:
        """The group that a global rank belongs to; its A group where it is in two."""
        return self.workers_of(rank)[0]

    def name_of(self, rank: int) -> str:
        """`rank 2 (A0)` or `rank 2 (A0, F0)`, for messages."""
        return f"rank {rank} ({', '.join(map(str, self.workers_of(rank)))})"

    def index_of(self, rank: int) -> int:
        """Position of a global rank inside its group: the data replica of an A rank, the expert shard of an F rank."""
        return self.ranks_of(self.worker_of(rank)).index(rank)

    def tail_rank(self, replica: int) -> int:
        """The rank that runs the tail of a data replica: that of A group 0, or an F rank, which may have several."""
        ranks = self.ranks_of(tail_worker(self.head, self.ffn_groups))
        return ranks[replica % len(ranks)]

    def first_rank(self, replica: int) -> int:
        """The rank of A group 0 of a data replica, which brings its data."""
        return self.ranks_of(Worker("A", 0))[replica]

    def tails_of(self, rank: int) -> tuple[int, ...]:
        """The data replicas whose tails a rank runs."""
        return tuple(replica for replica in range(self.attention) if self.tail_rank(replica) == rank)

    def copies_of(self, rank: int) -> Sequence[int]:
        """The ranks that hold the same dense parameters as this one, by their order: all whose gradients are summed.

        These are an A group or an F group (which may hold shared experts); the F ranks with tails are apart from
        those of their group that have none.
        """
        ranks = self.ranks_of(self.worker_of(rank))
        tails = [other for other in ranks if self.tails_of(other)]
        if not tails or len(tails) == len(ranks):
            return ranks
        return ranks[: len(tails)] if rank in tails else ranks[len(tails) :]

    def has_ranks_without_tail(self) -> bool:
        """Whether the group that runs tails on F ranks has more ranks than there are replicas."""
        return self.head == "ffn" and self.ffn > self.attention

    def describe(self) -> str:
        """`2A + 2F`, `2 x (2A + 2F, head on F)`, `1A + 1F, roles side by side`, `4 collocated` ..., for messages."""
        if self.collocated:
            return f"{self.attention} collocated"
        head = ", head on F" if self.head == "ffn" else ""
        head += ", roles side by side" if self.neighbours == "groups" else ""
        if not isinstance(self.groups, int):
            return f"{self.attention_groups} x {self.attention}A + {self.ffn_groups} x {self.ffn}F{head}"
        one = f"{self.attention}A + {self.ffn}F{head}"
        return one if self.groups == 1 else f"{self.groups} x ({one})"
