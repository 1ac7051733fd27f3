"""Start from the weights of a Hugging Face folder: each rank reads only the tensors that it owns.

A model made by `from_pretrained` on the meta device remembers its folder. After the split, `load_pretrained` fills the
parameters that are left to this rank; of experts it reads the rank's own ones only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.model.experts_module import is_experts
from lightning_afd.model.hub_folder import HubFolder
from lightning_afd.model.place import is_foreign
from lightning_afd.model.split import num_experts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_afd.model.hub_names import Source

ExpertIds = Mapping[nn.Module, Sequence[int]]


def from_pretrained(
    folder: str | Path, *, dtype: torch.dtype | str = "auto", model_class: Any = None, **overrides: Any
) -> PreTrainedModel:
    """The model of a Hugging Face folder, in train mode, to be called in `configure_model`.

    Where tensors are made on the meta device, as strategy afd does around `configure_model`, the weights come after the
    split, and each rank reads its own only; elsewhere they are loaded here and now. `dtype` is as in transformers:
    "auto" is that of the folder. `model_class` is AutoModelForCausalLM by default; `overrides` are attn_implementation,
    experts_implementation and fields of the configuration. Raises PlanError for weights that are missing, unexpected or
    of another shape, and for quantised ones.
    """
    import transformers

    path, model_class = Path(folder), model_class or transformers.AutoModelForCausalLM
    config = _configuration(path, overrides)
    deferred = torch.empty(0).is_meta
    with HubFolder(path) as files:
        dtype = _resolved(dtype, config.dtype, files)
        model = _empty(model_class, config, dtype)
        found = checked_sources(model, files)
    if not deferred:
        whole: PreTrainedModel = model_class.from_pretrained(path, config=config, dtype=dtype)
        return whole.train()
    if model.can_generate() and (path / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    model.afd_pretrained = Pretrained(path, found)
    return model.train()


@dataclass(frozen=True)
class Pretrained:
    """What a model without storage remembers: where its weights are, and which of them make what."""

    folder: Path
    sources: list[Source]


def _configuration(path: Path, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise PlanError(f"{path} is no Hugging Face folder: it has no config.json")
    fields, told = dict(overrides), AutoConfig.from_pretrained(path)
    model_type = fields.pop("model_type", told.model_type)
    if model_type != told.model_type:
        raise PlanError(f"{path} holds a model of type {told.model_type}, but {model_type} is asked for")
    config, unused = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **fields)
    if unused:
        raise PlanError(f"{', '.join(unused)}: not in the configuration of a {model_type} model")
    if getattr(config, "quantization_config", None) is not None:
        raise PlanError(
            f"{path} holds quantised weights, which can't be trained: dequantise them with transformers, and save them"
        )
    return config


def _resolved(dtype: torch.dtype | str, of_config: Any, files: HubFolder) -> torch.dtype:
    """A name of a dtype as the dtype; "auto" is what the config says, else what the first tensor has."""
    if dtype == "auto":
        dtype = of_config or files.read_rows(next(iter(files.names())), [0]).dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _empty(model_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device, with float32 where transformers insists on it."""
    from lightning_afd.model.hub_names import keep_in_float32

    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=dtype)
    keep_in_float32(model, dtype)
    return model


def load_pretrained(root: nn.Module, expert_ids: ExpertIds, device: torch.device) -> None:
    """Fill what this rank owns of models that `from_pretrained` made; what has storage already stays as it is.

    `expert_ids` are the global experts that this rank holds of each experts module.
    """
    for model in root.modules():
        pretrained = getattr(model, "afd_pretrained", None)
        if pretrained is not None and any(_is_lazy(tensor) for tensor in model.state_dict(keep_vars=True).values()):
            with HubFolder(pretrained.folder) as files:
                _Loader(model, files, expert_ids, device).load(pretrained.sources)


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_meta and not is_foreign(tensor)


class _Loader:
    """Fills one model from one folder."""

    def __init__(self, model: nn.Module, files: HubFolder, expert_ids: ExpertIds, device: torch.device) -> None:
        self._model: Any = model
        self._files, self._expert_ids, self._device = files, expert_ids, device
        self._state = model.state_dict(keep_vars=True)
        self._experts = expert_tensors(model)

    def load(self, sources: Sequence[Source]) -> None:
        from lightning_afd.model.hub_names import convert

        for source in sources:
            if any(self._wants(name) for name in source.targets):
                for name, tensor in convert(self._model, source, self._readers(source)).items():
                    if self._wants(name):
                        self._fill(name, tensor)

    def _wants(self, name: str) -> bool:
        return name in self._state and _is_lazy(self._state[name])

    def _readers(self, source: Source) -> dict[str, list[Callable[[], Tensor]]]:
        target = source.targets[0]
        module, dtype = self._experts.get(target), self._state[target].dtype
        ids = None if module is None else self._expert_ids.get(module)
        if module is None or ids is None:
            return {p: [partial(self._read, key, dtype) for key in keys] for p, keys in source.keys.items()}
        return {p: self._own_experts(keys, num_experts_of(module), ids, dtype) for p, keys in source.keys.items()}

    def _own_experts(
        self, keys: list[str], experts: int, ids: Sequence[int], dtype: torch.dtype
    ) -> list[Callable[[], Tensor]]:
        """Readers of this rank's experts: each has a tensor of its own, or all are stacked in one."""
        if len(keys) == experts:
            return [partial(self._read, keys[expert], dtype) for expert in ids]
        if len(keys) == 1 and self._files.shape(keys[0])[:1] == (experts,):
            return [lambda: self._files.read_rows(keys[0], ids).to(dtype)]
        raise PlanError(f"{keys[0]} and its like are {len(keys)} tensors, for {experts} experts: expected one of each")

    def _read(self, key: str, dtype: torch.dtype) -> Tensor:
        return self._files.read(key).to(dtype)

    def _fill(self, name: str, tensor: Tensor) -> None:
        """Give a parameter or buffer, under all its names, storage and values."""
        old = self._state[name]
        if tensor.shape != old.shape:
            raise PlanError(_shape_error(name, tensor.shape, old.shape))
        new = torch.empty_like(old, device=self._device).copy_(tensor)  # what was read may be a view of the file
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            vars(new).update(vars(old))
            new._is_hf_initialized = True  # type: ignore[attr-defined]
        for module in self._model.modules():
            for tensors in (module._parameters, module._buffers):
                for key in [key for key, held in tensors.items() if held is old]:
                    tensors[key] = new
        self._state |= {other: new for other, held in self._state.items() if held is old}


def expert_tensors(model: nn.Module) -> dict[str, nn.Module]:
    """The experts module of each parameter that holds experts, by the parameter's name."""
    return {
        f"{name}.{key}": module
        for name, module in model.named_modules()
        if is_experts(module)
        for key in module._parameters
    }


def checked_sources(model: PreTrainedModel, files: HubFolder) -> list[Source]:
    """What the folder's tensors make; raises PlanError for a missing, an unexpected or a differently shaped one.

    `model` is the whole one, on the meta device, so that the verdict is the same on every rank.
    """
    from lightning_afd.model.hub_names import listed, sources, tied_names, to_hub, unexplained

    state, names = model.state_dict(), tied_names(model)
    expected = to_hub(model, {name: state[name] for name in names})
    found = sources(model, files.names())
    missing, unexpected = unexplained(model, found, sources(model, expected))
    if missing or unexpected:
        what = listed(missing, unexpected)
        raise PlanError(f"the folder does not hold the weights of this {type(model).__name__}: {what}")
    for name in files.names():
        if name in expected and files.shape(name) != tuple(expected[name].shape):
            raise PlanError(_shape_error(name, files.shape(name), expected[name].shape))
    return sorted(found, key=lambda source: source.targets[0] not in names)  # second names of tied tensors last


def _shape_error(name: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{name} has the shape {list(found)} in the folder, and {list(wanted)} by the model's configuration"
