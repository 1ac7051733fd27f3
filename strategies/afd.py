"""`Trainer(strategy="afd")`: attention and experts on separate ranks, behind Lightning's strategy interface.

Order of calls: setup_environment (process groups) -> setup (split, optimizers) -> training_step ... -> teardown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_afd.engine import Engine, make_plan
from lightning_afd.errors import PlanError
from lightning_afd.model.place import owned_parameters
from lightning_afd.model.split import MoELayer
from lightning_afd.optimizer import clip_by_norm, drop_foreign, measure_norm
from lightning_afd.strategies.base import RankedStrategy
from lightning_afd.strategies.checkpoints import RankCheckpoints
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.driver import Driver, StepStats
from lightning_afd.strategies.epoch_hooks import EpochHooks
from lightning_afd.strategies.loaders import agree_on_length, restore_batch_hooks, silence_batch_hooks
from lightning_afd.strategies.refusals import refuse_optimizer, refuse_unsupported, refusing_several_optimizers
from lightning_afd.strategies.seeds import Seeds
from lightning_afd.timeline import Timeline


class AFDStrategy(RankedStrategy):
    """Train a Mixture-of-Experts model with attention and routed experts on separate ranks.

    Options are those of `AFDConfig`: attention, ffn, groups, micro_batches, order and others.
    Options of Lightning's own strategies (accelerator, parallel_devices, cluster_environment, precision_plugin,
    process_group_backend) are passed on. Raises MisconfigurationException for what cannot work.
    """

    strategy_name = "afd"

    def __init__(self, **options: Any) -> None:
        own = {name: options.pop(name) for name in AFDConfig.__dataclass_fields__ if name in options}
        self.config = AFDConfig(**own)
        super().__init__(timeout=self.config.timeout, **options)
        self.engine: Engine | None = None
        self.grad_norm: float | None = None
        """Norm of all gradients of the last optimizer step, before clipping; None where nobody asked for it."""
        self._driver: Driver | None = None
        self._epoch_hooks: EpochHooks | None = None
        self._accumulating = False
        self._checkpoints = RankCheckpoints(self)

    @override
    def _configure_launcher(self) -> None:
        self.layout = self.config.layout(self.num_processes * self.num_nodes)
        super()._configure_launcher()

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step, equal on all ranks."""
        return None if self._driver is None else self._driver.stats

    def gather_timeline(self) -> Timeline | None:
        """Collective: the spans of the last step of all ranks, on rank 0; None on the others.

        Times are comparable between ranks of one host.
        """
        assert self.engine is not None
        spans = self.transport.gather_object(self.engine.runtime.spans)
        return None if spans is None else Timeline(self.layout, tuple(span for part in spans for span in part))

    @property
    def checkpoint_notes(self) -> dict[str, Any]:
        """Plain values that are saved in each checkpoint and restored from it."""
        return self._checkpoints.notes

    @override
    def expert_maps(self) -> list[dict[str, Any]]:
        assert self.engine is not None
        return [vars(expert_map) for expert_map in self.engine.expert_maps()]

    @property
    def driver(self) -> Driver:
        assert self._driver is not None, "the strategy is not set up"
        return self._driver

    # -- set-up ---------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.guarded(self._setup, trainer)

    def _setup(self, trainer: pl.Trainer) -> None:
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer, module)
        self.engine, layers = self._make_engine(module)
        self._place(module, layers)
        self.engine.materialise(module, layers, self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        self._move_owned(module)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
        self.engine.connect(module, layers, self.root_device)
        self.seeds = Seeds(self.engine.seed, self.layout.index_of(self.global_rank))
        self._driver = Driver(self.engine, module, self.seeds)
        assert self._groups is not None
        self._epoch_hooks = EpochHooks(module, self.engine, self.guarded, self._groups.replicas)
        if not self.engine.is_attention:
            silence_batch_hooks(module)
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self._separate_random_numbers()

    def _make_engine(self, module: pl.LightningModule) -> tuple[Engine, Any]:
        """The engine of this rank, after all ranks have compared their plans."""
        config = self.config
        try:
            plan, layers = make_plan(
                module,
                self.layout,
                order=config.order,
                micro_batches=config.micro_batches,
                recompute=config.recompute,
                recompute_experts=config.recompute_experts,
            )
        except PlanError as error:
            raise MisconfigurationException(str(error)) from error
        self.compare_plans(repr(plan))
        return Engine(plan, self.global_rank, self.transport, self.transport), layers

    def _place(self, module: pl.LightningModule, layers: Sequence[MoELayer]) -> None:
        assert self.engine is not None
        try:
            self.engine.place(module, layers)
        except PlanError as error:
            raise MisconfigurationException(str(error)) from error

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with refusing_several_optimizers():
            super().setup_optimizers(trainer)
        self._checkpoints.name_parameters(self.optimizers)
        for optimizer in self.optimizers:
            refuse_optimizer(optimizer)
            drop_foreign(optimizer)

    def _separate_random_numbers(self) -> None:
        """Dropout differs between data replicas; replica 0 goes on as a single process would."""
        index = self.layout.index_of(self.global_rank)
        if index > 0:
            torch.manual_seed(torch.initial_seed() + index)

    # -- steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        around = self.precision_plugin.train_step_context
        return self.guarded(self.driver.train, (*args, *kwargs.values()), around, lambda: not self._accumulating)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", "val_step_context", (*args, *kwargs.values()))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", "test_step_context", (*args, *kwargs.values()))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        function, around = self.lightning_module.predict_step, self.precision_plugin.predict_step_context
        return self.guarded(self.driver.predict, function, (*args, *kwargs.values()), around)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.guarded(super().optimizer_step, *args, **kwargs)

    def _evaluate(self, step: str, context: str, args: tuple[Any, ...]) -> Any:
        function, around = getattr(self.lightning_module, step), getattr(self.precision_plugin, context)
        return self.guarded(self.driver.evaluate, function, args, around)

    # -- gradients ------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning's context of the batches before the last one of an accumulation window: nothing is reduced."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Lightning's clip by norm, with the one norm of all ranks: dense parameters once, experts of all F ranks."""
        assert self.engine is not None
        counts = not self.engine.is_attention or self.layout.index_of(self.global_rank) == 0
        parameters = self.driver.parameters
        norm = measure_norm(parameters, self.engine.collectives, counts=counts)
        self.grad_norm = norm.value
        if norm.culprit is not None:
            self._refuse_nonfinite(*norm.culprit)
        clip_by_norm(parameters, norm.value, float(clip_val))

    def _refuse_nonfinite(self, rank: int, number: int) -> None:
        if self.config.on_nonfinite == "skip":
            for parameter in self.driver.parameters:
                parameter.grad = None
            return
        names = [name for name, _ in owned_parameters(self.lightning_module)]
        name = self.transport.broadcast_object(names[number] if rank == self.global_rank else None, rank)
        worker = self.layout.worker_of(rank)
        raise FloatingPointError(
            f"the gradient of {name} on rank {rank} ({worker}) is not finite in step "
            f"{self.lightning_module.global_step}: lower the learning rate or check the data, "
            "or skip such steps with AFDStrategy(on_nonfinite='skip')"
        )

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One replica per A rank; F ranks look like the first one until their loader is replaced."""
        worker = self.layout.worker_of(self.global_rank)
        index = self.layout.index_of(self.global_rank) if worker.role == "A" else 0
        return {"num_replicas": self.layout.attention, "rank": index}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.engine is not None
        engine = self.engine
        return self.guarded(agree_on_length, dataloader, engine.collectives, is_attention=engine.is_attention)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are restored into what this rank owns after the split."""
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.owned_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise MisconfigurationException("strategy afd has no use for storage_options of save_checkpoint")
        if self._failed:
            rank_zero_warn("no checkpoint is written after a failure: ranks that have stopped hold parts of it")
        else:
            self.guarded(self._checkpoints.save, checkpoint, filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(
            checkpoint_path, self.config.weights_only if weights_only is None else weights_only
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.restore_owned(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.restore_optimizers(checkpoint, self.optimizers)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath)

    # -- end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        if self.engine is not None and self._driver is not None:
            self.engine.disconnect()
            restore_batch_hooks(self.lightning_module)
        if self._epoch_hooks is not None:
            self._epoch_hooks.remove()
        self._epoch_hooks = None
        self._driver = None
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        super().teardown()
