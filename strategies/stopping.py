"""How a strategy ends: together, with a checkpoint, where a rank got a signal; alone where a rank failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_afd.namespace import namespace_of
from lightning_afd.strategies.saving import SavingStrategy
from lightning_afd.strategies.signals import NOTHING, AgreedSignals, save_last

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StoppingStrategy(SavingStrategy):
    """A strategy whose ranks agree on signals at the end of each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._signals: AgreedSignals | None = None

    def _listen(self, trainer: pl.Trainer) -> None:
        """Take notes of signals from now on; a prediction leaves them to Lightning."""
        self._signals = None if trainer.state.fn == "predict" else AgreedSignals(trainer)

    def _wish(self) -> float:
        """What this rank asks for."""
        return NOTHING if self._signals is None else self._signals.wish()

    def _agree_on_signals(self, wish: float, *, step_ends: bool) -> None:
        """Take the largest wish of all ranks for what is done."""
        assert self._signals is not None
        self._signals.agree(wish, step_ends=step_ends)

    @property
    def _stops_together(self) -> bool:
        return self._signals is not None and self._signals.stops

    @property
    @override
    def leaves_alone(self) -> bool:
        module = self._lightning_module
        interrupted = module is not None and module.trainer.state.status == "interrupted"
        return super().leaves_alone or (interrupted and not self._stops_together)

    @override
    def on_exception(self, exception: BaseException) -> None:
        stopped = isinstance(exception, namespace_of(self).pytorch("utilities.exceptions").SIGTERMException)
        if stopped and self._stops_together:
            self.guarded(save_last, self.lightning_module.trainer)
        else:
            super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._signals is not None:
            self._signals.remove()
        self._signals = None
        super().teardown()
