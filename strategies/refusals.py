"""What cannot be trained with attention and experts apart, said by name at fit start on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn import Embedding, EmbeddingBag
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_afd.model.compiled import is_compiled_function
from lightning_afd.namespace import MisconfigurationException, namespace_of
from lightning_afd.placement import Sharding
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.deepspeed_zero import HOST_ADAM

if TYPE_CHECKING:
    import lightning.pytorch as pl

_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging", "BatchSizeFinder", "LearningRateFinder")
_BY_NUMBER = tuple(
    getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
)
"""Optimizers that update each number by itself, whatever tensor it lies in."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises MisconfigurationException with the first thing that cannot work."""
    lightning, strategy = namespace_of(trainer), f"strategy {trainer.strategy.strategy_name}"  # type: ignore[attr-defined]
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{strategy} needs automatic optimization, but the module sets automatic_optimization=False: "
            "the pipeline must know when a backward runs"
        )
    is_param_in_hook_signature = lightning.pytorch("utilities.signature_utils").is_param_in_hook_signature
    io = trainer.strategy.checkpoint_io
    if type(io) is not lightning.fabric("plugins").TorchCheckpointIO:
        raise MisconfigurationException(
            f"{strategy} writes its checkpoints itself and cannot use {type(io).__name__}: remove the plugin"
        )
    for name in _STEPS:
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise MisconfigurationException(f"{strategy} cannot run {name}(dataloader_iter): take a batch instead")
    if trainer.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"{strategy} does not support sync_batchnorm=True: its ranks run other micro-batches at the same time"
        )
    _refuse_compiled_steps(module, strategy)
    _refuse_metrics_that_wait(module, strategy)
    if trainer.state.fn == "fit":
        _refuse_sparse_gradients(module, strategy)
    refused = tuple(getattr(lightning.pytorch("callbacks"), name) for name in _CALLBACKS)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, refused):
            raise MisconfigurationException(
                f"{strategy} does not support {type(callback).__name__}: it copies or re-runs a module of which "
                "each rank holds only a part"
            )


def _refuse_compiled_steps(module: pl.LightningModule, strategy: str) -> None:
    """A step is suspended at each layer, which a graph cannot be."""
    for name in _STEPS:
        if is_compiled_function(getattr(module, name)):
            raise MisconfigurationException(
                f"{strategy} cannot run {name} compiled with torch.compile, since the step stops at each MoE layer: "
                "compile parts of the model beside the experts instead, such as self_attn, shared experts or the head"
            )


def _refuse_metrics_that_wait(module: pl.LightningModule, strategy: str) -> None:
    """A metric that talks to other ranks inside of a step waits for ranks that run another micro-batch, or none."""
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric.dist_sync_on_step:
            raise MisconfigurationException(
                f"{strategy} does not support dist_sync_on_step=True, as {name} has it: leave it out, "
                "metrics are joined at the end of an epoch"
            )


def _refuse_sparse_gradients(module: pl.LightningModule, strategy: str) -> None:
    """Gradients of attention ranks are summed in flat buckets, and clipped, kept and scaled as dense tensors."""
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True and isinstance(part, (Embedding, EmbeddingBag)):
            raise MisconfigurationException(
                f"{strategy} does not support sparse gradients, but {name} ({type(part).__name__}) has "
                "sparse=True: leave it out"
            )


def refuse_options_of_separate_ranks(options: Iterable[str], strategy: str) -> None:
    """Refuse options of strategy afd that another one does not have, as its ranks hold attention and experts."""
    known = AFDConfig.__dataclass_fields__
    wrong = [name for name in options if name in known]
    if wrong:
        raise MisconfigurationException(
            f"strategy {strategy} has no option {', '.join(wrong)}, since each of its ranks holds all attention and "
            "its share of the experts: leave it out, or use AFDStrategy, which separates them"
        )


@contextmanager
def refusing_several_optimizers(strategy: str) -> Iterator[None]:
    """Around Lightning's set-up of optimizers, whose own text advises manual optimization."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            f"strategy {strategy} supports one optimizer, but configure_optimizers returned several: "
            "use one optimizer with several parameter groups"
        ) from None


def refuse_optimizer(optimizer: object, strategy: str, sharding: Sharding, device: torch.device) -> None:
    """Refuse optimizers that call the closure several times, and those whose state cannot be divided if it is to be."""
    name = type(optimizer).__name__
    if name == "LBFGS":
        raise MisconfigurationException(
            f"strategy {strategy} does not support LBFGS: it runs the step several times per batch"
        )
    inner = [type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if sharding != "none" and (inner or not isinstance(optimizer, Optimizer)):
        why = f"it wraps {inner[0]}" if inner else "it is not a torch.optim.Optimizer"
        raise MisconfigurationException(
            f"optimizer_sharding={sharding!r} cannot divide the state of {name}, because {why}: return a plain "
            "optimizer from configure_optimizers, or use optimizer_sharding='none'"
        )
    if name == HOST_ADAM:
        _refuse_host_adam(sharding, device)
    elif sharding == "deepspeed":
        assert isinstance(optimizer, Optimizer)
        _refuse_flat_parts(optimizer)


def _refuse_host_adam(sharding: Sharding, device: torch.device) -> None:
    """DeepSpeed's Adam updates copies of a GPU's parameters in the host's memory, which its ZeRO makes."""
    if sharding == "deepspeed" and device.type != "cuda":
        raise MisconfigurationException(
            f"{HOST_ADAM} keeps optimizer state of CUDA devices in the host's memory, and this run computes on the "
            f"{device.type}: return torch.optim.AdamW(..., fused=True) from configure_optimizers"
        )
    if sharding != "deepspeed" and device.type == "cuda":
        raise MisconfigurationException(
            f"{HOST_ADAM} cannot update parameters on {device}: use optimizer_sharding='deepspeed', which keeps its "
            "state in the host's memory, or return torch.optim.AdamW(..., fused=True)"
        )


def _refuse_flat_parts(optimizer: Optimizer) -> None:
    """Parameters are cut anywhere, and their master weights are float32."""
    if type(optimizer) not in _BY_NUMBER:
        raise MisconfigurationException(
            f"optimizer_sharding='deepspeed' cuts parameters into flat parts, for which {type(optimizer).__name__} is "
            f"not known to work: choose one of {', '.join(kind.__name__ for kind in _BY_NUMBER)}, or "
            "optimizer_sharding='torch'"
        )
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        if parameter.dtype != torch.float32:
            raise MisconfigurationException(
                f"optimizer_sharding='deepspeed' divides float32 parameters, but one of shape {list(parameter.shape)} "
                f"is {str(parameter.dtype).removeprefix('torch.')}: choose precision 32-true, bf16-mixed or 16-mixed, "
                "or optimizer_sharding='torch'"
            )
