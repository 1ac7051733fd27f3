"""A small part of a transformers model, with random weights, that takes as long as it does in the whole model.

The model itself is only looked at: its parameters, also those on the meta device, stay as they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_afd.cost.config import model_shape
from lightning_afd.cost.model import ModelShape
from lightning_afd.errors import PlanError
from lightning_afd.model.hub_model import transformers_models
from lightning_afd.model.split import MoELayer, find_moe_layers

LAYERS = 2
"""MoE layers of a sample: windows of attention may alternate."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Ends and first MoE layers of a model, without storage for parameters."""

    model: nn.Module
    layers: tuple[MoELayer, ...]
    whole: ModelShape
    """The shapes of the whole model."""
    shape: ModelShape
    """Those of the sample."""

    def copy(self) -> nn.Module:
        """Another one."""
        return copy.deepcopy(self.model)


def sample_of(root: nn.Module, dtype: torch.dtype, device: torch.device, most: int = LAYERS) -> Sample:
    """The sample of the model inside `root`, with parameters of `dtype` and at most so many MoE layers; buffers that
    have values lie on `device`.

    Raises PlanError where there is no transformers model whose shapes can be read.
    """
    model = _language_model(root)
    whole = shape_of(root)
    layers = find_moe_layers(model)[:most]
    stack = layers[0].name.rpartition(".")[0]
    small = _without_other_layers(model, stack, [layer.layer for layer in layers], (dtype, device))
    shapes = [layer for layer in whole.layers if layer.experts is not None][: len(layers)]
    return Sample(model=small, layers=find_moe_layers(small), whole=whole, shape=replace(whole, layers=tuple(shapes)))


def shape_of(root: nn.Module) -> ModelShape:
    """The shapes of the model inside `root`; raises PlanError where they can't be read."""
    return model_shape(_language_model(root).config.to_dict())  # type: ignore[operator, union-attr]


def _language_model(root: nn.Module) -> nn.Module:
    models = transformers_models(root)
    if len(models) != 1:
        raise PlanError(
            f"{type(root).__name__} contains {len(models)} transformers models: one is needed for measuring how long "
            "its layers take; choose the layout yourself (attention=, ffn=)"
        )
    return next(iter(models.values()))


def _without_other_layers(
    model: nn.Module, stack: str, kept: list[nn.Module], to: tuple[torch.dtype, torch.device]
) -> nn.Module:
    """A copy without storage that has only some of the layers."""
    dtype, device = to
    memo: dict[int, object] = {id(p): _blank(p, dtype) for p in model.parameters()}
    memo |= {id(b): b.detach().clone() if b.is_meta else b.detach().to(device, copy=True) for b in model.buffers()}
    memo |= {id(layer): nn.Identity() for layer in model.get_submodule(stack) if not any(layer is k for k in kept)}
    small: nn.Module = copy.deepcopy(model, memo)
    parent, _, name = stack.rpartition(".")
    rest = [layer for layer in small.get_submodule(stack) if not isinstance(layer, nn.Identity)]
    setattr(small.get_submodule(parent), name, nn.ModuleList(rest))
    return small.train()


def _blank(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    wanted = dtype if parameter.is_floating_point() else parameter.dtype
    data: Tensor = torch.empty(parameter.shape, dtype=wanted, device="meta")
    return nn.Parameter(data, requires_grad=parameter.requires_grad)
