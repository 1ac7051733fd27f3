"""Which tensors of a placed module a rank brings to a checkpoint, and which it takes from one.

The rule: every rank that trains a parameter offers it. A buffer goes with the parameters beside it (those of the
closest module around it that has any, routed experts aside), from the first data replica only, since replicas may
differ. A rank takes what it trains, and every buffer that has storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd.errors import CheckpointError
from lightning_afd.expert_map import ExpertRows
from lightning_afd.model.experts_module import rows_of
from lightning_afd.model.place import foreign_names, is_owned
from lightning_afd.model.split import mark_of

State = dict[str, Any]


def offered_state(root: nn.Module, *, first_replica: bool) -> State:
    """The part of `root.state_dict()` that this rank brings to a checkpoint."""
    parameters = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    foreign, experts = foreign_names(root), _routed_experts(root)

    def offered(name: str, value: Any) -> bool:
        if name in parameters:
            return name not in foreign
        return first_replica and not _is_lazy(value) and _speaks_for(root, name, experts)

    return {name: value for name, value in root.state_dict().items() if offered(name, value)}


def needed_names(root: nn.Module) -> set[str]:
    """Names in `root.state_dict()` that this rank takes from a checkpoint."""
    foreign = foreign_names(root)
    return {name for name, value in root.state_dict().items() if name not in foreign and not _is_lazy(value)}


def rows_by_name(root: nn.Module) -> dict[str, ExpertRows]:
    """Which experts this rank holds of each stacked parameter."""
    named = root.named_parameters(remove_duplicate=False)
    return {name: rows for name, parameter in named if is_owned(parameter) and (rows := rows_of(parameter))}


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """For each name whose tensor is stored under an earlier name too, that name."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
            if first.setdefault(key, name) != name:
                tied[name] = first[key]
    return tied


def restore_state(root: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load what a rank needs out of `state`, in which stacked tensors may be whole or cut to this rank's experts.

    Raises CheckpointError with the name of a tensor of another shape, or (strict) of a missing or unexpected one.
    """
    own, needed, rows = root.state_dict(), needed_names(root), rows_by_name(root)
    if strict:
        _refuse("lacks", sorted(needed - set(state)))
        _refuse("holds the unknown", sorted(set(state) - set(own)))
    taken = {name: _cut(state[name], rows.get(name), own[name]) for name in own if name in needed and name in state}
    for name, value in taken.items():
        if isinstance(value, Tensor) and isinstance(own[name], Tensor) and value.shape != own[name].shape:
            raise CheckpointError(
                f"the checkpoint holds {name} with shape {list(value.shape)}, this model with {list(own[name].shape)}: "
                "build the model with the sizes that it was trained with"
            )
    root.load_state_dict(taken, strict=False)


def _cut(value: Any, rows: ExpertRows | None, own: Any) -> Any:
    """The rows of this rank's experts where `value` has those of all experts."""
    if rows is None or not isinstance(value, Tensor) or value.shape == own.shape or value.shape[:1] != (rows.total,):
        return value
    return value[list(rows.experts)]


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"the checkpoint {what} {names[0]}{more}: it belongs to another model (strict_loading=False loads the rest)"
        )


def _speaks_for(root: nn.Module, name: str, experts: set[int]) -> bool:
    """Whether this rank trains the parameters beside a buffer."""
    parts = name.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        around = root.get_submodule(".".join(parts[:depth]))
        first = next((p for p in around.parameters() if id(p) not in experts), None)
        if first is not None:
            return is_owned(first)
    return True


def _routed_experts(root: nn.Module) -> set[int]:
    return {id(p) for module in root.modules() if mark_of(module) is not None for p in module.parameters()}


def _is_lazy(value: Any) -> bool:
    """Whether a buffer of a module that does not run here was never materialised."""
    return isinstance(value, torch.Tensor) and value.device.type == "meta"
