"""The experts modules of transformers: how one is told, what it stores, and how it is cut down to some experts."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import ExpertRows

_FLAGS = ("has_gate", "has_bias", "is_transposed")


@dataclass(frozen=True, slots=True)
class Flags:
    """How an experts module stores its weights: transformers' decorator says so on the instance."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool


def flags_of(module: nn.Module) -> Flags | None:
    """The flags of an experts module; without the decorator they follow from `_apply_gate` and the weights' shapes."""
    if all(hasattr(module, flag) for flag in _FLAGS):
        return Flags(*(bool(getattr(module, flag)) for flag in _FLAGS))
    parameters = dict(module.named_parameters(recurse=False))
    if not hasattr(module, "_apply_gate") or not {"gate_up_proj", "down_proj"} <= parameters.keys():
        return None
    up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if up.dim() != 3 or down.dim() != 3:
        return None
    (wide, hidden), (out, width) = up.shape[1:], down.shape[1:]
    return Flags(True, "down_proj_bias" in parameters, (wide, hidden) != (2 * width, out))


def is_experts(module: nn.Module) -> bool:
    """Tell whether a module follows the experts contract: flags, 3-D parameters, called as experts(x, idx, w)."""
    flags = flags_of(module)
    if flags is None:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    up = parameters.get("gate_up_proj" if flags.has_gate else "up_proj")
    down = parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3 or len(up) != len(down):
        return False
    return len(inspect.signature(type(module).forward).parameters) == 4  # self, x, idx, w


def check_experts(module: nn.Module) -> None:
    """Raise PlanError where a module does not follow the contract, or has weights that F ranks could not train."""
    if not is_experts(module):
        raise PlanError(f"{type(module).__name__} doesn't follow the experts contract of transformers 5")
    known = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
    strange = [name for name, _ in module.named_parameters() if name not in known]
    if strange:
        raise PlanError(
            f"{type(module).__name__} has parameters that F ranks can't train, since all experts share them: "
            + ", ".join(strange)
        )


def shard_experts(module: nn.Module, experts: Sequence[int]) -> None:
    """Keep only the given global experts, in that order, in every parameter of an experts module, in place.

    Each parameter is replaced by a new one with its own storage, the same name, requires_grad and attributes;
    parameters on meta stay on meta. Raises PlanError for an expert that the module doesn't have.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        wrong = [expert for expert in experts if not 0 <= expert < len(parameter)]
        if wrong:
            raise PlanError(f"experts {wrong} asked of {name}, which holds experts 0 to {len(parameter) - 1}")
        index = torch.tensor(list(experts), dtype=torch.long, device=parameter.device)
        kept = nn.Parameter(parameter.detach().index_select(0, index), requires_grad=parameter.requires_grad)
        vars(kept).update(vars(parameter))  # such as a mark by which configure_optimizers sorts parameters
        kept.afd_rows = ExpertRows(tuple(experts), len(parameter))  # type: ignore[attr-defined]
        setattr(module, name, kept)
    if hasattr(module, "num_experts"):
        module.num_experts = len(experts)


def rows_of(parameter: Tensor) -> ExpertRows | None:
    """Which experts a parameter that `shard_experts` made holds; None for one that is whole."""
    return getattr(parameter, "afd_rows", None)
