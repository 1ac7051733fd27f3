"""Orders of collocated ranks, each of which is A worker and F worker at once: one program for all of them.

Transfers are placed as ever: sends start directly behind what they carry away, receives wait directly before what needs
them. What an order hides behind what follows from where it puts its compute actions, and from its blocks: roles of
which everything that is computed without a break first receives all that it needs, and sends all of it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from lightning_afd.errors import PlanError
from lightning_afd.placement import Role, Worker
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.schedule.orders import sequential
from lightning_afd.schedule.passes import Piece, in_one_go, pieces, place_transfers
from lightning_afd.schedule.shape import Schedule, Shape


@dataclass(frozen=True)
class Together:
    """The program of all ranks of a collocated layout. Passes over it are Together -> Together."""

    shape: Shape
    order: str
    """Name of the order that built it."""
    program: tuple[Step, ...]
    """The steps of each rank, as A worker and as F worker, in their order."""

    @property
    def schedule(self) -> Schedule:
        """The same as one program per worker."""
        programs = {
            worker: tuple(step.action for step in self.program if step.worker == worker)
            for worker in self.shape.workers()
        }
        return Schedule(self.shape, self.order, programs)


def layer_by_layer(shape: Shape) -> list[Action]:
    """All micro-batches of a segment, then all of its experts, then the next segment; each tail's backward at once.

    While micro-batch m travels, attention of the next ones and experts of those before it are computed, as in FlowMoE.
    """

    def key(action: Action) -> tuple[int, int, bool, int]:
        if shape.runs_tail(action):
            return 0, shape.layers, False, action.micro_batch
        if action.phase == "f":
            return 0, action.layer, action.op == "E", action.micro_batch
        return 1, -action.layer, action.op == "A", action.micro_batch

    return sorted(sequential(shape), key=key)


@dataclass(frozen=True, kw_only=True)
class TogetherOrder:
    """How an order computes and what it hides."""

    compute: Callable[[Shape], Iterable[Action]]
    blocks: tuple[Role, ...]
    """Roles behind whose work nothing of their own travels."""


TOGETHER_ORDERS: Mapping[str, TogetherOrder] = MappingProxyType(
    {
        "sequential": TogetherOrder(compute=sequential, blocks=("A", "F")),  # every transfer is waited for
        "experts-only": TogetherOrder(compute=layer_by_layer, blocks=("A",)),  # hidden behind experts
        "flowmoe": TogetherOrder(compute=layer_by_layer, blocks=()),  # behind attention, routers and the tail, too
    }
)


def build_together(order: str, shape: Shape) -> Together:
    """The program of an order; raises PlanError for an unknown name."""
    if order not in TOGETHER_ORDERS:
        raise PlanError(f"order={order!r} is none of collocated ranks: choose one of {', '.join(TOGETHER_ORDERS)}")
    chosen = TOGETHER_ORDERS[order]
    program: list[Step] = []
    for worker, block in _blocks(shape, list(chosen.compute(shape)), chosen.blocks):
        program += (Step(worker, action) for action in in_one_go(block))
    return Together(shape, order, tuple(program))


def _blocks(shape: Shape, computation: list[Action], blocks: tuple[Role, ...]) -> Iterator[tuple[Worker, list[Piece]]]:
    """The compute actions with their transfers: what one worker of these roles does in a row together, else alone."""
    by_worker = {
        worker: tuple(action for action in computation if shape.owner(action) == worker) for worker in shape.workers()
    }
    placed = place_transfers(Schedule(shape, "", by_worker)).programs
    waiting = {worker: iter(pieces(shape, worker, program)) for worker, program in placed.items()}
    for worker, group in groupby(computation, key=shape.owner):
        block = [next(waiting[worker]) for _ in group]
        if worker.role in blocks:
            yield worker, block
        else:
            yield from ((worker, [piece]) for piece in block)


def forward_only_together(together: Together) -> Together:
    """Keep the forward phase alone, for evaluation."""
    return replace(together, program=tuple(step for step in together.program if step.action.phase == "f"))
