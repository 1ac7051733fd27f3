"""Names and shapes of weights on the Hugging Face hub against those in memory.

Everything that needs the inner functions of transformers' weight conversion is here: on the hub each expert has tensors
of its own in most architectures, in memory one tensor holds all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, Tensor]


def tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Every tensor that a folder holds, by its name in memory, with all names of it: more than one where it is tied."""
    state = model.state_dict(keep_vars=True)
    kept = remove_tied_weights_from_state_dict({name: t.detach().to("meta") for name, t in state.items()}, model)
    for name in model._keys_to_ignore_on_save or ():
        kept.pop(name, None)
    return {name: [other for other in state if state[other] is state[name]] for name in kept}


@dataclass(frozen=True)
class Unit:
    """Tensors that are converted together."""

    names: tuple[str, ...]
    """Names in memory."""
    hub: Mapping[str, torch.Size]
    """Names and shapes of what they become on the hub."""


def units(model: PreTrainedModel, state: Mapping[str, Tensor]) -> list[Unit]:
    """Cut a state without storage into the smallest parts that convert independently: layers, or all of it at once."""
    parts: dict[str, Tensors] = {}
    for name, tensor in state.items():
        layer = re.match(r".*?\.\d+\.", name)
        parts.setdefault(layer[0] if layer else "", {})[name] = tensor
    layers = [Unit(tuple(part), {n: t.shape for n, t in to_hub(model, part).items()}) for part in parts.values()]
    together = {name: tensor.shape for name, tensor in to_hub(model, state).items()}
    separate = {name: shape for unit in layers for name, shape in unit.hub.items()}
    return layers if separate == together else [Unit(tuple(state), together)]


def to_hub(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Tensors:
    """The same weights under their names on the hub, each contiguous; `model` may be on the meta device."""
    converted = revert_weight_conversion(model, dict(tensors))
    return {name: _without_view(t) if t.is_meta else t.contiguous() for name, t in converted.items()}


def _without_view(tensor: Tensor) -> Tensor:
    """The size of a tensor without storage is that of the storage that it would look at."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@dataclass(frozen=True)
class Source:
    """What makes one or more tensors in memory out of tensors of a folder."""

    targets: tuple[str, ...]
    converter: WeightConverter | None
    """None where the one tensor is taken as it is."""
    keys: dict[str, list[str]]
    """Names in the folder, in the order of experts, by the pattern of the converter that they match."""

    def all_keys(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]


def sources(model: PreTrainedModel, keys: Iterable[str]) -> list[Source]:
    """Sort the names of a folder by what they make; targets need not exist in the model."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix, found = model.state_dict(), model.base_model_prefix, dict[str, Source]()
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:  # saved under the names in memory
            target, pattern = key, None
        converter = None if pattern is None else by_pattern[pattern]
        patterns = converter.target_patterns if converter is not None else [target]
        targets = tuple(target.replace(patterns[0], other) for other in patterns)
        source = found.setdefault(target, Source(targets, converter, {}))
        source.keys.setdefault(pattern or key, []).append(key)
    return list(found.values())


def unexplained(
    model: PreTrainedModel, found: Sequence[Source], expected: Sequence[Source]
) -> tuple[list[str], list[str]]:
    """Names that are missing, and names that nothing in the model is made of.

    A tensor that is stored in another form than `save_pretrained` would choose, such as fused, is taken as it is.
    """
    made = {target: source for source in found for target in source.targets}
    info = SimpleNamespace(missing_keys=set[str](), unexpected_keys=set[str]())
    for source in expected:
        others = made.get(source.targets[0])
        mine, theirs = set(source.all_keys()), set() if others is None else set(others.all_keys())
        if others is None or mine & theirs:
            info.missing_keys |= mine - theirs
            info.unexpected_keys |= theirs - mine
    state = model.state_dict()
    for source in found:
        if state.keys().isdisjoint(source.targets):
            info.unexpected_keys |= set(source.all_keys())
    model._adjust_missing_and_unexpected_keys(info)
    return sorted(info.missing_keys, key=dot_natural_key), sorted(info.unexpected_keys, key=dot_natural_key)


def listed(missing: Sequence[str], unexpected: Sequence[str], most: int = 4) -> str:
    """Both lists for an error message: the first few names of each."""
    parts = []
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        more = f" and {len(names) - most} more" if len(names) > most else ""
        parts += [f"{word} {', '.join(names[:most])}{more}"] if names else []
    return "; ".join(parts)


def convert(model: PreTrainedModel, source: Source, readers: Mapping[str, Sequence[Callable[[], Tensor]]]) -> Tensors:
    """Make the targets of a source: `readers` read its tensors, by pattern, and are called one after another."""
    if source.converter is None:
        ((reader,),) = readers.values()
        return {source.targets[0]: reader()}
    converter = deepcopy(source.converter)
    for pattern, functions in readers.items():
        for function in functions:
            converter.add_tensor(source.targets[0], pattern, pattern, function)
    made = converter.convert(source.targets[0], model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model without storage float32 where transformers keeps it in a model of `dtype` (routers, norms)."""
    plan = model._get_dtype_plan(dtype)
    patterns = [pattern.replace("*", ".*") for pattern in plan]
    for module_name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                name = f"{module_name}.{key}"
                if tensor is not None and any(re.search(pattern, name) for pattern in patterns):
                    tensor.data = tensor.data.to(torch.float32)
