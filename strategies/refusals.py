"""What cannot be trained with attention and experts apart, said by name at fit start on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import BatchSizeFinder, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

_CALLBACKS = (StochasticWeightAveraging, WeightAveraging, BatchSizeFinder)


def refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises MisconfigurationException with the first thing that cannot work."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "strategy afd needs automatic optimization, but the module sets automatic_optimization=False: "
            "the pipeline must know when a backward runs"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException("strategy afd cannot run training_step(dataloader_iter): take a batch instead")
    io = trainer.strategy.checkpoint_io
    if type(io) is not TorchCheckpointIO:
        raise MisconfigurationException(
            f"strategy afd writes its checkpoints itself and cannot use {type(io).__name__}: remove the plugin"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _CALLBACKS):
            raise MisconfigurationException(
                f"strategy afd does not support {type(callback).__name__}: it copies or re-runs a module of which "
                "each rank holds only a part"
            )


@contextmanager
def refusing_several_optimizers() -> Iterator[None]:
    """Around Lightning's set-up of optimizers, whose own text advises manual optimization."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            "strategy afd supports one optimizer, but configure_optimizers returned several: "
            "use one optimizer with several parameter groups"
        ) from None


def refuse_optimizer(optimizer: object) -> None:
    """Refuse optimizers that call the closure several times."""
    if type(optimizer).__name__ == "LBFGS":
        raise MisconfigurationException("strategy afd does not support LBFGS: it runs the step several times per batch")
