"""Which optimizer a rank steps, and which holds its state, where A ranks divide the state among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning_afd.transport.p2p import ProcessGroups


def divide_state(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], groups: ProcessGroups) -> list[Optimizer]:
    """Optimizers that divide the state over the ranks of `groups.replicas`, also for their schedulers.

    One that trains nothing on these ranks stays as it is.
    """
    from lightning_afd.strategies.sharded_optimizer import ShardedOptimizer  # slow to import

    divided = list(optimizers)
    for number, optimizer in enumerate(optimizers):
        if any(group["params"] for group in optimizer.param_groups):
            # Callbacks log rates under the name of the class.
            same_name = type(type(optimizer).__name__, (ShardedOptimizer,), {})
            divided[number] = same_name(optimizer, groups)
            for scheduler in schedulers:
                _rebind(scheduler, optimizer, divided[number])
    return divided


def share_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the state of this rank's share."""
    return optimizer.share() if hasattr(optimizer, "share_was_loaded") else optimizer


def share_was_loaded(optimizer: Optimizer) -> None:
    """Take over the hyperparameters that were loaded into `share_of(optimizer)`."""
    if hasattr(optimizer, "share_was_loaded"):
        optimizer.share_was_loaded()


def _rebind(scheduler: Any, old: Optimizer, new: Optimizer) -> None:
    """Let a scheduler, and schedulers inside of it, work on another optimizer with the same groups."""
    for name, value in list(vars(scheduler).items()):
        if value is old:
            setattr(scheduler, name, new)
        for part in value if isinstance(value, list | tuple) else [value]:
            if part is not scheduler and getattr(part, "optimizer", None) is old:
                _rebind(part, old, new)
