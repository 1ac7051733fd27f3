"""`Trainer(strategy="afd")`: attention and experts on separate ranks, behind Lightning's strategy interface.

Order of calls: setup_environment (process groups) -> setup (split, optimizers) -> training_step ... -> teardown.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_afd.engine import Engine
from lightning_afd.errors import PlanError
from lightning_afd.model.lazy import without_storage
from lightning_afd.model.split import MoELayer
from lightning_afd.namespace import MisconfigurationException, namespace_of
from lightning_afd.optimizer import drop_foreign
from lightning_afd.plan import make_plan
from lightning_afd.recording.saved import FOLDER
from lightning_afd.strategies.deepspeed_zero import keep_native_half
from lightning_afd.strategies.divided import Division, divide_state
from lightning_afd.strategies.driver import Driver, StepStats
from lightning_afd.strategies.expert_balance import ExpertBalance
from lightning_afd.strategies.gradient_norm import GradientNorm
from lightning_afd.strategies.hooks import UserHooks
from lightning_afd.strategies.loaders import EvaluationEpoch, Place, TrainingEpoch, share_loader
from lightning_afd.strategies.notes import Activity
from lightning_afd.strategies.planned import PlannedStrategy
from lightning_afd.strategies.predictions import join_predictions
from lightning_afd.strategies.refusals import refuse_optimizer, refuse_unsupported, refusing_several_optimizers
from lightning_afd.strategies.scaler import loss_scale, share_found_inf
from lightning_afd.strategies.seeds import Seeds, separate_random_numbers
from lightning_afd.strategies.tracing import Figures, Tracer
from lightning_afd.strategies.tuning import ChunkSize
from lightning_afd.strategies.watch import activity_of
from lightning_afd.timeline import Timeline
from lightning_afd.tune import Tuning

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AFDStrategy(PlannedStrategy):
    """Train a Mixture-of-Experts model with attention and routed experts on separate ranks.

    Options are those of `AFDConfig`: attention, ffn, groups, head, micro_batches, order and so on. Options of
    Lightning's own strategies (accelerator, parallel_devices, cluster_environment, precision_plugin,
    process_group_backend) are passed on. Raises MisconfigurationException for what cannot work.

    An instance is for the Trainer of the package that is imported, lightning.pytorch or pytorch_lightning; where both
    are, `AFDStrategy.of("pytorch_lightning")(...)` chooses.
    """

    strategy_name = "afd"
    tuning = Tuning()
    """How S_p is searched with reduce_chunk_bytes="auto"."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.engine: Engine | None = None
        self._driver: Driver | None = None
        self._hooks: UserHooks | None = None
        self._gradient_norm: GradientNorm | None = None
        self._balance: ExpertBalance | None = None
        self._tracer: Tracer | None = None
        self._unshare_found_inf: Callable[[], None] = lambda: None
        self._accumulating = False

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step, equal on all ranks."""
        return None if self._driver is None else self._driver.stats

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients in the last optimizer step, before clipping; under a loss scaler only if clipped by."""
        return None if self._gradient_norm is None else self._gradient_norm.value

    @property
    def recorded(self) -> Figures | None:
        """Figures of the last batch, equal on all ranks, if it belongs to a step that was recorded (`trace`)."""
        return None if self._tracer is None else self._tracer.figures

    def gather_timeline(self) -> Timeline | None:
        """Collective: what all ranks did in the last step, on rank 0; None on the others.

        Times are comparable between ranks of one host.
        """
        assert self.engine is not None
        runtime = self.engine.runtime
        parts = self.transport.gather_object((runtime.spans, runtime.reduces))
        if parts is None:
            return None
        spans, reduces = (tuple(chain.from_iterable(each)) for each in zip(*parts, strict=True))
        return Timeline(self.layout, spans, reduces)

    @override
    def expert_maps(self) -> list[dict[str, Any]]:
        assert self.engine is not None
        return [vars(expert_map) for expert_map in self.engine.expert_maps()]

    @property
    def balance(self) -> ExpertBalance:
        """Tokens per expert, and the biases that balance them."""
        assert self._balance is not None, "the strategy is not set up"
        return self._balance

    @property
    def driver(self) -> Driver:
        assert self._driver is not None, "the strategy is not set up"
        return self._driver

    @override
    def _activity(self) -> Activity:
        return activity_of(getattr(self.engine, "runtime", None))

    # -- set-up ---------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around configure_model: modules get no storage before it is known what this rank owns, unless asked for."""
        storage = super().tensor_init_context(empty_init) if empty_init is False else without_storage()
        with storage, self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.guarded(self._setup, trainer)

    def _setup(self, trainer: pl.Trainer) -> None:
        module, fitting = self.lightning_module, trainer.state.fn == "fit"
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer, module)
        self.settle(trainer)
        if reason := self.arrangement.reason:
            rank_zero_info(f"strategy {self.strategy_name} trains collocated (order {self.order}): {reason}")
        self.engine, layers = self._make_engine(module)
        self._place(module, layers)
        self.engine.materialise(module, layers, self.root_device)
        with self.balance.kept_in_float32():
            self.model = self.precision_plugin.convert_module(module)
        self._move_owned(module)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            namespace_of(self).fabric("utilities.optimizer")._optimizers_to_device(self.optimizers, self.root_device)
        self.engine.connect(module, layers, self.root_device)
        self.seeds = Seeds(self.engine.seed, self.layout.index_of(self.global_rank))
        self._listen(trainer)
        size = ChunkSize(self.config.reduce_chunk_bytes, self.tuning, self.engine, lambda: self.checkpoint_notes)
        self._driver = Driver(self.engine, module, self.seeds, self._wish, size)
        self._tracer = Tracer(self.engine, self.config.trace, str(self._backend), reads_nics=self.local_rank == 0)
        assert self._groups is not None
        self._hooks = UserHooks(module, self.engine, self.guarded, self._groups.replicas, self._driver.metrics)
        self._judge_gradients(self.engine, module)
        separate_random_numbers(self.layout.index_of(self.global_rank))

    def _judge_gradients(self, engine: Engine, module: pl.LightningModule) -> None:
        """Clipping, and what is done about gradients that are not finite, become decisions of all ranks together."""
        skip = self.config.on_nonfinite == "skip"
        self._gradient_norm = GradientNorm(engine, module, self.precision_plugin, skip=skip)
        self._unshare_found_inf = share_found_inf(self.precision_plugin, engine.collectives)

    def _make_engine(self, module: pl.LightningModule) -> tuple[Engine, Any]:
        """The engine of this rank, after all ranks have compared their plans."""
        try:
            plan, layers = make_plan(module, self.layout, **self.config.choices(self.arrangement))
        except PlanError as error:
            raise MisconfigurationException(str(error)) from error
        self.compare_plans(f"{plan!r}, {self.config.agreed()}")
        return Engine(plan, self.global_rank, self.transport, self.transport), layers

    def _place(self, module: pl.LightningModule, layers: Sequence[MoELayer]) -> None:
        assert self.engine is not None
        try:
            self.engine.place(module, layers)
            self._balance = ExpertBalance(self.engine, layers)
        except PlanError as error:
            raise MisconfigurationException(str(error)) from error

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with refusing_several_optimizers(self.strategy_name):
            super().setup_optimizers(trainer)
        self._checkpoints.name_parameters(self.optimizers)
        sharding = self.config.sharding
        for optimizer in self.optimizers:
            refuse_optimizer(optimizer, self.strategy_name, sharding, self.root_device)
            drop_foreign(optimizer)
            keep_native_half(optimizer)
        if sharding != "none":
            assert self.engine is not None and self._groups is not None
            replicas = self.layout.attention if self.engine.is_attention else 1
            division = Division(sharding=sharding, groups=self._groups, replicas=replicas)
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            self.optimizers = divide_state(self.optimizers, schedulers, division)

    # -- steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        around = self.precision_plugin.train_step_context
        scale = loss_scale(self.precision_plugin, self.lightning_module.trainer.accumulate_grad_batches)
        given, last_of_window = (*args, *kwargs.values()), lambda: not self._accumulating
        assert self._tracer is not None
        self._tracer.begin(0 if self._accumulating else self.lightning_module.trainer.global_step + 1)
        made = self.guarded(self.driver.train, given, around, last_of_window, scale)
        self._tracer.end_batch()
        if not self._accumulating:
            self.guarded(self.balance.end_window)
        self._agree_on_signals(self.driver.wish, step_ends=not self._accumulating)
        return made

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
        step = partial(super().optimizer_step, *args, **kwargs)
        made = self.guarded(self.balance.around, step, self.precision_plugin, self._gradient_norm)
        assert self._tracer is not None and self.stats is not None
        self.guarded(self._tracer.finish, self.stats, self._trace_folder)
        return made

    def _trace_folder(self) -> Path:
        """Collective: where recordings go."""
        trainer, chosen = self.lightning_module.trainer, self.config.trace_dir
        return Path(chosen) if chosen != "auto" else Path(trainer.log_dir or trainer.default_root_dir, FOLDER)

    def _evaluate(self, step: str, context: str, args: tuple[Any, ...]) -> Any:
        function, around = getattr(self.lightning_module, step), getattr(self.precision_plugin, context)
        out = self.guarded(self.driver.evaluate, function, args, around)
        self._agree_on_signals(self.driver.wish, step_ends=self.lightning_module.trainer.state.fn != "fit")
        return out

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

    # -- data -----------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.engine is not None
        engine, trainer = self.engine, self.lightning_module.trainer
        if trainer.training:
            self._checkpoints.note_batches(dataloader)
        place = Place(
            replicas=self.layout.attention,
            replica=self.layout.index_of(self.global_rank),
            is_attention=engine.is_attention,
            training=trainer.training,
            epoch=TrainingEpoch(trainer) if trainer.training else EvaluationEpoch(),
            gather=partial(self.guarded, engine.collectives.all_gather),
        )
        return self.guarded(share_loader, dataloader, place)

    def on_predict_end(self) -> None:
        """Lightning's hook; what `trainer.predict` returns is in place already, as this rank's part."""
        self.guarded(join_predictions, self.lightning_module.trainer.predict_loop, self.driver.engine)

    # -- end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        if self.engine is not None and self._driver is not None:
            self.engine.disconnect()
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None
        self._driver = None
        self._unshare_found_inf()
        if self._gradient_norm is not None:
            self._gradient_norm.detach()
        super().teardown()
