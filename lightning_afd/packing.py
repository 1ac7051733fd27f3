"""Documents in rows of equal length, and rows over ranks so that all have equal work in attention.

A row is what one sequence of a batch holds; its documents don't see one another, so that the work of attention is the
sum of their squared lengths, whatever the length of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_afd.errors import PlanError

Row = tuple[int, ...]
"""Tokens of each document, in order."""


def rows_of_documents(lengths: Iterable[int], seq_len: int) -> list[Row]:
    """Put documents of these lengths into rows of exactly `seq_len` tokens, in order.

    What crosses the end of a row goes on in the next one, as a document of its own; an unfilled last row is left out.
    """
    if seq_len < 1:
        raise PlanError(f"seq_len={seq_len}: at least 1 is needed")
    rows: list[Row] = []
    row: list[int] = []
    room = seq_len
    for length in lengths:
        while length > 0:
            part = min(length, room)
            row.append(part)
            length, room = length - part, room - part
            if room == 0:
                rows.append(tuple(row))
                row, room = [], seq_len
    return rows


def attention_work(row: Row) -> int:
    """Query-key pairs of a row, without the factor for causality: the sum of squared lengths of its documents."""
    return sum(length * length for length in row)


def deal(work: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the items of each rank, equally many, such that the largest sum of `work` is small.

    The heaviest item first goes to the rank with the least work that has room for one more (Graham, SIAM J. Appl. Math.
    17, 1969, with a bound on the number of items); never worse than `deal_plainly`. Every rank gets the same answer.
    """
    share, rest = divmod(len(work), ranks)
    if rest:
        raise PlanError(f"{len(work)} items cannot be dealt to {ranks} ranks in equal numbers")
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for item in sorted(range(len(work)), key=lambda index: -work[index]):
        rank = min((rank for rank in range(ranks) if len(dealt[rank]) < share), key=lambda rank: sums[rank])
        dealt[rank].append(item)
        sums[rank] += work[item]
    best = min((dealt, deal_plainly(len(work), ranks)), key=lambda choice: max(loads(work, choice)))
    return [sorted(items) for items in best]


def deal_plainly(items: int, ranks: int) -> list[list[int]]:
    """Every `ranks`-th item to the same rank, as a distributed sampler does."""
    return [list(range(rank, items, ranks)) for rank in range(ranks)]


def loads(work: Sequence[int], dealt: Sequence[Sequence[int]]) -> list[int]:
    """Work of each rank."""
    return [sum(work[item] for item in items) for items in dealt]


def imbalance(work: Sequence[int], dealt: Sequence[Sequence[int]]) -> float:
    """Largest work of a rank over the mean: all ranks wait for that one."""
    sums = loads(work, dealt)
    return max(sums) * len(sums) / max(1, sum(sums))
