"""Which optimizer a rank steps, and which holds its state, where ranks divide the state among them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from lightning_afd.placement import Sharding
from lightning_afd.strategies.deepspeed_zero import HOST_ADAM, ZeroParts
from lightning_afd.strategies.flat_optimizer import FlatOptimizer, trained_groups

if TYPE_CHECKING:
    from lightning_afd.transport.p2p import ProcessGroups


@runtime_checkable
class Divided(Protocol):
    """An optimizer that keeps the state of its rank's share only."""

    def share(self) -> Optimizer:
        """Collective over the ranks that divide: the user's optimizer, with the state that this rank is to save."""

    def loading(self) -> AbstractContextManager[Optimizer]:
        """The user's optimizer, to load the state of the parameters in it; behind the context that is taken over."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Who divides what."""

    sharding: Sharding
    groups: ProcessGroups
    replicas: int
    """Ranks that train the same parameters as this one and have all their gradients."""


def divide_state(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], division: Division) -> list[Optimizer]:
    """Optimizers that divide the state over the ranks of `groups.replicas`, also for their schedulers.

    One that trains nothing on these ranks stays as it is, and so does that of a rank without replicas, unless it is for
    the host's memory.
    """
    divided = list(optimizers)
    for number, optimizer in enumerate(optimizers):
        on_host = division.sharding == "deepspeed" and type(optimizer).__name__ == HOST_ADAM
        if on_host:
            division.groups.make_alone()
        if (division.replicas > 1 or on_host) and any(map(len, trained_groups(optimizer))):
            divided[number] = _divided(optimizer, division, on_host=on_host)
            for scheduler in schedulers:
                _rebind(scheduler, optimizer, divided[number])
    return divided


def _divided(optimizer: Optimizer, division: Division, *, on_host: bool) -> Optimizer:
    """Of a class with the same name, under which callbacks log rates."""
    name = type(optimizer).__name__
    if division.sharding == "torch":
        from lightning_afd.strategies.sharded_optimizer import ShardedOptimizer  # slow to import

        return type(name, (ShardedOptimizer,), {})(optimizer, division.groups)
    groups, is_alone = division.groups, division.replicas == 1
    open_parts = partial(ZeroParts, group_of=lambda: groups.alone if is_alone else groups.replicas, offload=on_host)
    return type(name, (FlatOptimizer,), {})(optimizer, open_parts)


def share_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the state of this rank's share."""
    return optimizer.share() if isinstance(optimizer, Divided) else optimizer


def loading(optimizer: Optimizer) -> AbstractContextManager[Optimizer]:
    """The optimizer into which the state of this rank's share is loaded."""
    return optimizer.loading() if isinstance(optimizer, Divided) else nullcontext(optimizer)


def _rebind(scheduler: Any, old: Optimizer, new: Optimizer) -> None:
    """Let a scheduler, and schedulers inside of it, work on another optimizer with the same groups."""
    for name, value in list(vars(scheduler).items()):
        if value is old:
            setattr(scheduler, name, new)
        for part in value if isinstance(value, list | tuple) else [value]:
            if part is not scheduler and getattr(part, "optimizer", None) is old:
                _rebind(part, old, new)
