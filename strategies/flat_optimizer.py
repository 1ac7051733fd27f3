"""Optimizer state divided over ranks by numbers: each parameter group is one flat tensor, cut into equal parts.

An engine (`Parts`, DeepSpeed's ZeRO stage 1) updates this rank's part of each group and exchanges the parts. It knows
flat tensors only; here they get gradients, hyperparameters and checkpoints of parameters. Every rank has the whole
reduced gradient, so that clipping, hooks and verdicts stay as they are.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_afd.errors import CheckpointError
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.optimizer import drop_state_of_others

PER_PARAMETER = ("step", "mu_product")
"""State that is one number per parameter, of the optimizers that a flat part can be updated by."""


class Parts(Protocol):
    """An engine that has moved the parameters of each group, in order, into one flat tensor cut into equal parts.

    Behind the last parameter there are zeros.
    """

    optimizer: Optimizer
    """The user's, with this rank's part of each group as its only parameter."""
    rank: int
    """Whose part this rank has."""

    @property
    def group(self) -> Any:
        """Process group of the ranks that have the parts; None behind a fit."""

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update this rank's part of each group by its gradient, of the same size, and exchange the parts."""

    def load(self, number: int, state: dict[str, Any]) -> None:
        """Give this rank's part of a group another optimizer state; its weights may have changed, too."""


@dataclass(frozen=True)
class Fragment:
    """Numbers of a parameter that lie in a part."""

    parameter: nn.Parameter
    start: int
    """The first of them, counted in the flattened parameter."""
    place: int
    """Where that is in the part."""
    count: int

    @property
    def is_whole(self) -> bool:
        """Whether no other part has numbers of the parameter."""
        return self.count == self.parameter.numel()


def fragments(parameters: Sequence[nn.Parameter], part: int, size: int) -> list[Fragment]:
    """What the part of this number holds, where parameters lie one behind the other and parts have `size` numbers."""
    found, offset = [], -part * size
    for parameter in parameters:
        first, end = max(0, offset), min(size, offset + parameter.numel())
        if first < end:
            found.append(Fragment(parameter, first - offset, first, end - first))
        offset += parameter.numel()
    return found


def trained_groups(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """The parameters of each group that are to be divided."""
    return [[p for p in group["params"] if p.requires_grad and p.numel()] for group in optimizer.param_groups]


class FlatOptimizer(Optimizer):
    """Stands in for a user's optimizer, which updates this rank's parts only; the groups here are the user's."""

    def __init__(self, optimizer: Optimizer, open_parts: Callable[[Optimizer], Parts]) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        trained = trained_groups(optimizer)
        self._numbers = [number for number, parameters in enumerate(trained) if parameters]
        """Of the groups that have a flat tensor."""
        self._trained = [parameter for parameters in trained for parameter in parameters]
        optimizer.param_groups = [{**optimizer.param_groups[n], "params": list(trained[n])} for n in self._numbers]
        drop_state_of_others(optimizer)
        self._parts = open_parts(optimizer)
        self._ranks = dist.get_process_group_ranks(self._parts.group)
        """Global ones by part: behind a fit, when the group is gone, they still talk in the default group."""
        self._fragments = [
            fragments(trained[number], self._parts.rank, flat.numel())
            for number, flat in zip(self._numbers, self._flats, strict=True)
        ]

    @property
    def _flats(self) -> list[nn.Parameter]:
        """This rank's part of each group that has one."""
        return [group["params"][0] for group in self._parts.optimizer.param_groups]

    @property
    def state(self) -> Any:
        """State of this rank's parts, by flat tensor."""
        return self._parts.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        """Torch's constructor sets an empty one, for nothing."""

    # -- steps ----------------------------------------------------------------------------------------------------

    @override
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parts and exchange them; where no parameter has a gradient, nothing is done."""
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [parameter.grad for parameter in self._trained]
        if any(grad is not None for grad in grads):
            self._refuse_parts_of_a_step()
            self._hand_on_hyperparameters()
            self._parts.step(self._gradients())
            for parameter, grad in zip(self._trained, grads, strict=True):
                parameter.grad = grad  # engines drop gradients, at which users may still look
        return loss

    # Torch's schedulers were made with the user's optimizer: they look here whether steps are made before theirs.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _gradients(self) -> list[Tensor]:
        return [
            _flatten(held, flat.numel(), [f.parameter.grad for f in held], self._trained[0].device)
            for held, flat in zip(self._fragments, self._flats, strict=True)
        ]

    def _refuse_parts_of_a_step(self) -> None:
        """A plain optimizer leaves a parameter without gradient alone, a flat part moves on as a whole."""
        divided = {id(parameter) for parameter in self._trained}
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if (parameter.grad is None) == (id(parameter) in divided):
                    what = "has no gradient in this step" if parameter.grad is None else "was frozen when the fit began"
                    raise MisconfigurationException(
                        f"optimizer_sharding='deepspeed' updates all parameters or none, but parameter {place} of "
                        f"group {number}, of shape {list(parameter.shape)}, {what}: use optimizer_sharding='torch'"
                    )

    def _hand_on_hyperparameters(self) -> None:
        """Schedulers and hooks of the user set them here."""
        for number, group in zip(self._numbers, self._parts.optimizer.param_groups, strict=True):
            group.update(_hyperparameters(self.param_groups[number]))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def share(self) -> Optimizer:
        """Collective: the user's optimizer with each parameter that begins in this rank's parts, and all its state.

        What lies in other parts of such a parameter is sent by their ranks.
        """
        share = self._with([[f.parameter for f in held if f.start == 0] for held in self._fragments])
        for held, flat in zip(self._fragments, self._flats, strict=True):
            state = self.state.get(flat, {})
            for key in sorted(state):
                for fragment in held:
                    value = state[key] if key in PER_PARAMETER else self._whole(fragment, state[key])
                    if fragment.start == 0:
                        share.state[fragment.parameter][key] = value
        return share

    def _whole(self, fragment: Fragment, flat: Tensor) -> Tensor | None:
        """The state of a parameter on the rank where it begins; None on others, which send their fragment there."""
        own = flat.narrow(0, fragment.place, fragment.count)
        if fragment.is_whole:
            return own.view_as(fragment.parameter)
        group, device, size = self._parts.group, fragment.parameter.device, flat.numel()
        if fragment.start > 0:
            first = self._parts.rank + (fragment.place - fragment.start) // size
            dist.send(own.to(device), self._ranks[first], group)
            return None
        pieces, missing = [own.to(device)], fragment.parameter.numel() - fragment.count
        for number, start in enumerate(range(0, missing, size), start=self._parts.rank + 1):
            pieces.append(torch.empty(min(size, missing - start), dtype=flat.dtype, device=device))
            dist.recv(pieces[-1], self._ranks[number], group)
        return torch.cat(pieces).view_as(fragment.parameter).to(flat.device)

    @contextmanager
    def loading(self) -> Iterator[Optimizer]:
        """The user's optimizer with all parameters of which this rank has numbers, to load state into."""
        share = self._with([[f.parameter for f in held] for held in self._fragments])
        yield share
        for group, loaded in zip(self.param_groups, share.param_groups, strict=True):
            group.update(_hyperparameters(loaded))
        for number, (held, flat) in enumerate(zip(self._fragments, self._flats, strict=True)):
            states = [share.state.get(f.parameter, {}) for f in held]
            self._parts.load(number, self._joined(held, states, flat))

    def _joined(self, held: Sequence[Fragment], states: Sequence[Mapping[str, Any]], flat: Tensor) -> dict[str, Any]:
        """State of a part, out of that of the parameters in it."""
        joined: dict[str, Any] = {}
        for key in sorted({key for state in states for key in state}):
            values = [state.get(key) for state in states]
            if any(value is None for value in values) or (key in PER_PARAMETER and len(set(map(float, values))) > 1):
                raise CheckpointError(
                    f"the checkpoint's optimizer state {key} is not the same for all parameters of a group, as where "
                    "some had no gradient in a step: optimizer_sharding='deepspeed' keeps one for all, use 'torch'"
                )
            joined[key] = values[0] if key in PER_PARAMETER else _flatten(held, flat.numel(), values, flat.device)
        return joined

    def _with(self, parameters: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        """The user's optimizer without state, with these parameters in the groups that have a flat tensor."""
        held = dict(zip(self._numbers, parameters, strict=True))
        share = copy.copy(self._parts.optimizer)
        share.param_groups = [
            {**group, "params": list(held.get(number, ()))} for number, group in enumerate(self.param_groups)
        ]
        share.state = defaultdict(dict)
        return share


def _flatten(held: Sequence[Fragment], size: int, values: Sequence[Any], device: torch.device) -> Tensor:
    """A part [size] out of one tensor per parameter; zeros where there is none."""
    flat = torch.zeros(size, dtype=values[0].dtype if values else torch.float32, device=device)
    for fragment, value in zip(held, values, strict=True):
        piece = value.detach().reshape(-1).narrow(0, fragment.start, fragment.count)
        flat.narrow(0, fragment.place, fragment.count).copy_(piece)
    return flat


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
