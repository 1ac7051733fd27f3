"""The parts of a FlatOptimizer by torch alone: what DeepSpeed's ZeRO stage 1 does, without DeepSpeed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class FlatParts:
    """Moves the parameters of each group into one flat tensor, of which every rank updates a part."""

    def __init__(self, optimizer: Optimizer, group_of: Callable[[], Any], *, offload: bool) -> None:
        self.optimizer, self._group_of, self.offload = optimizer, group_of, offload
        self.rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._flats = [_moved(group["params"], ranks) for group in optimizer.param_groups]
        for group, flat in zip(optimizer.param_groups, self._flats, strict=True):
            group["params"] = [nn.Parameter(flat.chunk(ranks)[self.rank])]

    @property
    def group(self) -> Any:
        """Of the ranks that have the parts."""
        return self._group_of()

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update this rank's parts and exchange them; as with DeepSpeed, gradients of parameters are gone then."""
        parts = [group["params"][0] for group in self.optimizer.param_groups]
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient
        self.optimizer.step()
        self.exchange(parts)
        for parameter in self._parameters:
            parameter.grad = None

    def exchange(self, parts: Sequence[Tensor]) -> None:
        """Every rank gets all parts."""
        for part, flat in zip(parts, self._flats, strict=True):
            dist.all_gather_into_tensor(flat, part.detach().clone(), self.group)

    def load(self, number: int, state: dict[str, Any]) -> None:
        """Another state of a part."""
        self.optimizer.state[self.optimizer.param_groups[number]["params"][0]] = state


def _moved(parameters: Sequence[nn.Parameter], ranks: int) -> Tensor:
    """One tensor with all numbers of the parameters, which become views into it, and zeros up to equal parts."""
    total = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(-(-total // ranks) * ranks, dtype=parameters[0].dtype)
    places = flat[:total].split([parameter.numel() for parameter in parameters])
    for parameter, place in zip(parameters, places, strict=True):
        parameter.data = place.copy_(parameter.detach().view(-1)).view_as(parameter)
    return flat
