"""State of an optimizer by parameter name, whatever part of the parameters this rank trains.

`names[g][i]` is the global name of parameter i of group g as the user's configure_optimizers made it, before parameters
of other ranks were dropped; it is what links the numbers of torch's own optimizer states to names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_afd.checkpoint.tensors import Part
from lightning_afd.errors import CheckpointError
from lightning_afd.model.experts_module import rows_of

GroupNames = list[list[str]]
ByName = dict[str, dict[str, Any]]


def group_names(optimizer: Optimizer, root: nn.Module) -> GroupNames:
    """Names of the parameters of each group; one that is not in the module is named by its place."""
    known = {id(parameter): name for name, parameter in root.named_parameters()}
    return [
        [known.get(id(p), f"group {number}, parameter {place}") for place, p in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def held_parameters(optimizer: Optimizer, root: nn.Module, names: GroupNames) -> dict[str, nn.Parameter]:
    """The parameters that this rank trains, by name."""
    known = {id(parameter): name for name, parameter in root.named_parameters()}
    held = {}
    for group, all_names in zip(optimizer.param_groups, names, strict=True):
        own = {known[id(p)]: p for p in group["params"] if id(p) in known}
        held |= {name: own[name] for name in all_names if name in own}
    return held


def dump_groups(optimizer: Optimizer, names: GroupNames) -> list[dict[str, Any]]:
    """Hyperparameters of each group, with all names as its "params"."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": list(own)}
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]


def dump_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> tuple[ByName, ByName]:
    """State of this rank's parameters: tensors (`Part`s for experts), and what is no tensor."""
    tensors, plain = ByName(), ByName()
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors.setdefault(name, {})[key] = _part(f"{key} of {name}", value, parameter)
            else:
                plain.setdefault(name, {})[key] = value
    return tensors, plain


def _part(what: str, value: Tensor, parameter: nn.Parameter) -> Tensor | Part:
    """Optimizer state of stacked experts is cut like them; one number stands for all of them."""
    rows = rows_of(parameter)
    if rows is None or value.numel() == 1:
        return value
    if len(value) != len(rows.experts):
        raise CheckpointError(
            f"the optimizer state {what} has shape {list(value.shape)} for {len(rows.experts)} experts: it mixes "
            "experts and depends on the layout, so it cannot be saved; choose an optimizer with state per parameter"
        )
    return Part(value, rows)


def keys_of(saved: Sequence[Mapping[str, Any]], names: GroupNames) -> dict[str, Any]:
    """For each parameter name what the saved groups call it: its name, or torch's number.

    Raises CheckpointError where the groups hold other parameters.
    """
    if len(saved) != len(names):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has {len(names)}: "
            "configure_optimizers must build the same groups"
        )
    keys: dict[str, Any] = {}
    for number, (group, own) in enumerate(zip(saved, names, strict=True)):
        theirs = list(group["params"])
        if theirs and isinstance(theirs[0], str):
            strange = sorted(set(theirs) ^ set(own))
            if strange:
                whose = "the checkpoint's" if strange[0] in theirs else "this"
                raise CheckpointError(
                    f"parameter group {number} differs from the checkpoint's: only {whose} optimizer trains "
                    f"{strange[0]}; configure_optimizers must build the same groups"
                )
            keys |= {name: name for name in own}
        elif len(theirs) != len(own):
            raise CheckpointError(
                f"parameter group {number} of the checkpoint's optimizer has {len(theirs)} parameters, this one "
                f"{len(own)}: configure_optimizers must build the same groups"
            )
        else:
            keys |= dict(zip(own, theirs, strict=True))
    return keys


def restore(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]], state: ByName
) -> None:
    """Load hyperparameters and the state by name of this rank's parameters."""
    number = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    merged = [
        {**{key: value for key, value in saved.items() if key != "params"}, "params": [number[id(p)] for p in own]}
        for saved, own in zip(groups, (group["params"] for group in optimizer.param_groups), strict=True)
    ]
    by_number = {number[id(parameters[name])]: values for name, values in state.items()}
    for name, values in state.items():
        _check_shapes(name, values, parameters[name])
    optimizer.load_state_dict({"state": by_number, "param_groups": merged})


def _check_shapes(name: str, values: Mapping[str, Any], parameter: nn.Parameter) -> None:
    rows = rows_of(parameter)
    for key, value in values.items():
        if rows is not None and isinstance(value, Tensor) and value.numel() != 1 and len(value) != len(rows.experts):
            raise CheckpointError(
                f"the checkpoint's {key} of {name} has {len(value)} rows for {len(rows.experts)} experts: "
                "it was saved by an optimizer whose state depends on the layout"
            )


def by_number(groups: Sequence[Mapping[str, Any]], state: ByName) -> dict[str, Any]:
    """The same as torch writes it: parameters numbered through all groups."""
    number = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    numbered = [{**group, "params": [number[name] for name in group["params"]]} for group in groups]
    return {"state": {number[name]: values for name, values in state.items()}, "param_groups": numbered}
