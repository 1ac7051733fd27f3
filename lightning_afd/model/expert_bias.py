"""Load balancing without an auxiliary loss: a bias per expert that takes part in the choice of experts only.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; arXiv 2408.15664): after each step the bias of an expert with more tokens
than the mean falls by a rate, and that of one with fewer rises. transformers has the bias, but nothing that moves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.model.split import MoELayer


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertBias:
    """The bias of one layer, known by its module and name: changes of dtype or device replace the tensor."""

    layer: int
    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        value = getattr(self.module, self.name)
        assert isinstance(value, Tensor)
        return value

    def replace(self, value: Tensor) -> None:
        """Take `value` for the bias, in its dtype and on the device where the bias is now."""
        value = value.to(self.tensor.device)
        if isinstance(self.tensor, nn.Parameter):
            self.tensor.data = value
        else:
            self.module._buffers[self.name] = value

    @torch.no_grad()
    def move(self, counts_E: Tensor, rate: float) -> None:
        """bias += rate * sign(mean count - count), with exact integers; nothing where the bias has no storage."""
        bias = self.tensor
        if not bias.is_meta:
            sign_E = (counts_E.sum() - counts_E.numel() * counts_E).sign()
            bias.add_(sign_E.to(bias).view_as(bias), alpha=rate)


def find_biases(layers: Sequence[MoELayer]) -> tuple[ExpertBias, ...]:
    """The biases of these layers; raises PlanError where no layer has one.

    A bias is what nobody trains beside the experts: a buffer or a parameter without gradient, one number per expert,
    with a name such as e_score_correction_bias or expert_bias ("bias" alone is part of a projection).
    """
    found = [bias for layer in layers for bias in _biases_of(layer)]
    if not found:
        raise PlanError(
            f"expert_bias_rate: {layers[0].name} and the other MoE layers have no bias to move, that is a buffer of "
            f"{layers[0].num_experts} numbers such as e_score_correction_bias in DeepSeek-V3: set expert_bias_rate=0 "
            "and balance the experts by an auxiliary loss"
        )
    return tuple(found)


@contextmanager
def kept_in_float32(biases: Sequence[ExpertBias]) -> Iterator[None]:
    """Whatever dtype the model gets inside: biases keep their values in float32, where a small rate is not lost."""
    values = [None if bias.tensor.is_meta else bias.tensor.detach().to(torch.float32, copy=True) for bias in biases]
    yield
    for bias, value in zip(biases, values, strict=True):
        if value is not None:
            bias.replace(value)


def _biases_of(layer: MoELayer) -> list[ExpertBias]:
    inside = set(layer.experts.modules())
    return [
        ExpertBias(layer=layer.index, module=module, name=name)
        for module in layer.layer.modules()
        if module not in inside
        for name, tensor in (*module._buffers.items(), *module._parameters.items())
        if tensor is not None and _is_bias(name, tensor, layer.num_experts)
    ]


def _is_bias(name: str, tensor: Tensor, experts: int) -> bool:
    named = "bias" in name and name != "bias"
    return named and tensor.is_floating_point() and not tensor.requires_grad and tensor.numel() == experts
