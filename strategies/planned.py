"""A strategy whose ranks decide at the start of a fit who does what, where its user has left that open.

Lightning has called the user's setup and configure_model by then, so that the whole model can be looked at, and nothing
has been split yet. The default process group exists from the start; groups that follow from the layout are made behind
the decision.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.errors import PlanError
from lightning_afd.nics import NicShares
from lightning_afd.placement import Layout
from lightning_afd.strategies.config import AFDConfig, Arrangement, EPConfig
from lightning_afd.strategies.planning.decide import Asked, Decided, Decision, save_plan
from lightning_afd.strategies.planning.measured import Calibrate, calibrated
from lightning_afd.strategies.refusals import refuse_options_of_separate_ranks
from lightning_afd.strategies.stopping import StoppingStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PlannedStrategy(StoppingStrategy):
    """Options, the arrangement that follows from them, and the plan where it does not."""

    config_type: type[AFDConfig] | type[EPConfig] = AFDConfig
    arrangement: Arrangement
    """How this job is trained; until a plan is made, how it would be without one."""
    calibrate: Calibrate = staticmethod(calibrated)
    """Measures this job's model on these ranks."""

    def __init__(self, **options: Any) -> None:
        own = {name: options.pop(name) for name in self.config_type.__dataclass_fields__ if name in options}
        refuse_options_of_separate_ranks(options, self.strategy_name)
        self.config = self.config_type(**own)
        self._decided: Decided | None = None
        self._checkpoint: Any = None
        super().__init__(timeout=self.config.timeout, weights_only=self.config.weights_only, **options)
        self.nics = self.config.nics

    @property
    def order(self) -> str:
        """Order of the schedule."""
        return self.arrangement.order

    @override
    def _configure_launcher(self) -> None:
        self.arrange(self.config.arrange(self.num_processes * self.num_nodes))
        super()._configure_launcher()

    def arrange(self, arrangement: Arrangement) -> None:
        """Decide how this job is trained, on all ranks alike and before they make their process groups."""
        self.layout = self.config.on_nodes(arrangement.layout, self.num_processes)
        self.arrangement = replace(arrangement, layout=self.layout)

    @property
    def _is_open(self) -> bool:
        """Whether it is still to be decided how this job is trained."""
        return self._decided is None and self.config.needs_plan(self.layout.world)

    @override
    def _choose_nics(self, layout: Layout) -> None:
        """A plan from a file says what NICs ranks get; one made at the start of a fit comes too late for that."""
        if self.config.plan_file is not None:
            with suppress(PlanError):  # Decision says on all ranks what is wrong with it
                plan = PlanChoice.load(self.config.plan_file)
                if plan.best.layout.world == layout.world:
                    layout = self._take_nics(plan)
        super()._choose_nics(layout)

    def _take_nics(self, plan: PlanChoice) -> Layout:
        """What the plan gives each role; returns the layout that will be trained, where roles may lie otherwise."""
        assert isinstance(self.config, AFDConfig)
        if self.config.falls_back(plan.verdict.disaggregate):
            return Layout.together(plan.best.layout.world)
        self.nic_shares = NicShares(attention=plan.attention_nics, ffn=plan.ffn_nics)
        return self.config.planned(plan.best).layout

    @override
    def _connect(self) -> None:
        if self._is_open:
            self.compare_plans(repr(self.config))
        else:
            super()._connect()

    @override
    def _begins(self, trainer: pl.Trainer) -> None:
        """Lightning resolves "last" and "best" itself and tells a strategy only behind its set-up."""
        connector = trainer._checkpoint_connector
        select = type(connector)._select_ckpt_path

        def selected(*args: Any, **kwargs: Any) -> Any:
            self._checkpoint = select(connector, *args, **kwargs)
            return self._checkpoint

        connector._select_ckpt_path = selected

    def settle(self, trainer: pl.Trainer) -> None:
        """Collective, at the start of set-up: decide what is open, and connect the ranks accordingly."""
        if not self._is_open:
            return
        assert isinstance(self.config, AFDConfig)
        checkpoint = None if self._checkpoint is None else str(self._checkpoint)
        asked = Asked(strategy=self, config=self.config, trainer=trainer, checkpoint=checkpoint)
        decided = Decision(asked, self.calibrate).make()
        self._rearrange(decided.arrangement)
        if asked.is_fit:
            self._decided = decided
            self._note_plan()
            save_plan(decided, trainer)
        for line in decided.lines:
            rank_zero_info(f"strategy {self.strategy_name}: {line}")

    def _rearrange(self, arrangement: Arrangement) -> None:
        self.arrange(arrangement)
        if self._board is not None:
            self._board.rename(self.layout)
        with self._sockets.opening():
            self.connect_ranks()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._note_plan()  # the one of the checkpoint may be another job's
        return checkpoint

    def _note_plan(self) -> None:
        if self._decided is not None and self._decided.plan is not None:
            self.checkpoint_notes["plan"] = self._decided.plan.dumps()
