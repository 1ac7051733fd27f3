"""The transformers model inside a module: what a checkpoint says about it, and a copy of it without storage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_afd.errors import PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


HUB = "hub"
"""Key of `hub_entry` in a checkpoint."""


def transformers_models(root: nn.Module) -> dict[str, PreTrainedModel]:
    """The outermost transformers models of a module, by their qualified names."""
    from transformers import PreTrainedModel

    found: dict[str, PreTrainedModel] = {}
    for name, module in root.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[name] = module
    return found


def hub_entry(root: nn.Module, tokenizer: Any = None) -> dict[str, Any]:
    """What a checkpoint must say so that its weights can be written as a Hugging Face folder: plain values only.

    `models` has class, configuration and generation configuration by qualified name, `tokenizer` the texts of the
    tokenizer's files by name; it may be one of transformers, or of the package tokenizers.
    """
    models = {name: _described(model) for name, model in transformers_models(root).items()}
    return {"models": models, "tokenizer": _tokenizer_files(tokenizer)}


def with_hub_entry(checkpoint: dict[str, Any], module: Any) -> dict[str, Any]:
    """The checkpoint of a LightningModule with its `hub_entry`, on the rank that writes it.

    The tokenizer is the attribute `tokenizer` of the module or of its datamodule.
    """
    if HUB in checkpoint or not module.trainer.is_global_zero:
        return checkpoint
    tokenizer = getattr(module, "tokenizer", None) or getattr(module.trainer.datamodule, "tokenizer", None)
    return {**checkpoint, HUB: hub_entry(module, tokenizer)}


def _tokenizer_files(tokenizer: Any) -> dict[str, str]:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if isinstance(tokenizer, Tokenizer):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return {}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [path for path in Path(folder).iterdir() if path.suffix in (".json", ".txt", ".jinja")]
        return {path.name: path.read_text(encoding="utf-8") for path in files}


def _described(model: PreTrainedModel) -> dict[str, Any]:
    generation = model.generation_config if model.can_generate() else None
    return {
        "class": type(model).__name__,
        "config": json.loads(model.config.to_json_string()),
        "generation_config": None if generation is None else json.loads(generation.to_json_string()),
    }


def empty_model(description: Mapping[str, Any]) -> PreTrainedModel:
    """The described model on the meta device; raises PlanError where transformers has no such class or configuration.

    `description` is one of `models` of `hub_entry`.
    """
    import transformers

    name, fields = description["class"], description["config"]
    model_class = getattr(transformers, name, None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model or fields.get("model_type") not in transformers.CONFIG_MAPPING:
        raise PlanError(f"{name} is not a model of transformers {transformers.__version__}: it can't be built here")
    with TemporaryDirectory() as folder:  # the way on which infinities come back, which JSON does not know
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config)
    if description["generation_config"] is not None:
        model.generation_config = transformers.GenerationConfig.from_dict(description["generation_config"])
    return model


def described_by_folder(folder: Path) -> dict[str, Any]:
    """A description of the model of a folder with a config.json, for checkpoints that carry none."""
    import transformers

    if not (folder / "config.json").is_file():
        raise PlanError(f"{folder} is no folder with a config.json")
    config = transformers.AutoConfig.from_pretrained(folder)
    names = config.architectures or [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return {"class": names[0], "config": json.loads(config.to_json_string()), "generation_config": None}
