"""Optimizer state divided over the A ranks of a group (ZeRO-1), by torch's ZeroRedundancyOptimizer.

Every A rank has the whole reduced gradient, so that clipping, hooks and verdicts stay as they are; it then updates its
share of the parameters, and each share is broadcast by its rank. The import takes a second: torch compiles optimizers
that nobody uses here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_afd.optimizer import drop_state_of_others
from lightning_afd.transport.p2p import ProcessGroups

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what torch itself uses to compile them
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Stands in for a user's optimizer, which becomes `optim`: it keeps this rank's share of the parameters only.

    The groups here are the user's, with all parameters. Where all parameters that train have one dtype, they are moved
    into one flat tensor per rank (at the same values), which is sent as it is; else each is sent by itself.
    """

    def __init__(self, optimizer: Optimizer, groups: ProcessGroups) -> None:
        self._groups = groups
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        super().__init__(
            optimizer.param_groups,
            optimizer_class=partial(_keep_share, optimizer),  # type: ignore[arg-type]
            process_group=groups.replicas,
            parameters_as_bucket_view=len({parameter.dtype for parameter in trained}) == 1,
            **optimizer.defaults,
        )

    def _verify_same_dense_param_type(self) -> None:
        """Torch refuses several dtypes, which only its flat tensors cannot hold."""

    @property
    def process_group(self) -> Any:
        """The A ranks of the group, asked for each time: after a failure a reference would keep connections open."""
        return self._groups.replicas

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Torch's constructor sets what is known here already."""

    @property
    def state(self) -> Any:
        """State of this rank's share."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        """Torch's constructor sets an empty one, for nothing."""

    @override
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's share and exchange all shares.

        Lightning's closure runs first: torch would overwrite a rate that the user's hooks set inside of it.
        """
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step(**kwargs)
        return loss

    # Torch's schedulers were made with the user's optimizer: they look here whether steps are made before theirs.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def share(self) -> Optimizer:
        """The user's optimizer with this rank's share of the parameters, and the hyperparameters of now."""
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        return self.optim

    @contextmanager
    def loading(self) -> Iterator[Optimizer]:
        """`share()`, whose loaded hyperparameters are taken over."""
        yield self.share()
        self._sync_param_groups(self.optim.param_groups, self.param_groups)


def _keep_share(optimizer: Optimizer, groups: list[dict[str, Any]], **defaults: Any) -> Optimizer:
    """In place of a constructor: the user's own optimizer with this rank's groups, whatever class it has."""
    optimizer.param_groups = groups
    drop_state_of_others(optimizer)
    return optimizer
