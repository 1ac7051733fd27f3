"""The user's hooks at the end of an epoch look at what steps left behind, so they run on the ranks where steps end.

What they log is joined over these ranks and logged on all ranks, so that monitors agree. Metrics of torchmetrics are
reduced over these ranks, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torchmetrics import Metric

from lightning_afd.engine import Engine
from lightning_afd.namespace import namespace_of
from lightning_afd.strategies.step_log import Exchange, Recorder

if TYPE_CHECKING:
    import lightning.pytorch as pl

_HOOKS = tuple(f"on_{stage}_epoch_end" for stage in ("train", "validation", "test"))


class EpochHooks:
    """Stands in for the epoch-end hooks of one module until `remove`.

    `guard` runs a function that talks to other ranks; `group` is the process group of the ranks where steps end.
    """

    def __init__(self, module: pl.LightningModule, engine: Engine, guard: Callable[..., Any], group: Any) -> None:
        self._module = module
        self._runs = engine.has_tail
        is_overridden = namespace_of(module).pytorch("utilities.model_helpers").is_overridden
        self._hooks = [name for name in _HOOKS if is_overridden(name, module)]
        self._metrics = [m for m in module.modules() if isinstance(m, Metric) and m.process_group is None]
        for name in self._hooks:
            exchange = Exchange(engine.collectives, speaks=engine.has_tail)
            module.__dict__[name] = partial(guard, self._run, getattr(module, name), exchange)
        for metric in self._metrics:
            metric.process_group = group

    def remove(self) -> None:
        """Give the module its own hooks and metrics back."""
        for name in self._hooks:
            self._module.__dict__.pop(name, None)
        for metric in self._metrics:
            metric.process_group = None

    def _run(self, hook: Callable[[], Any], exchange: Exchange) -> None:
        recorder = Recorder()
        if self._runs:
            with recorder.capture(self._module):
                hook()
        _, logged = exchange.share([], recorder, by_rows=True)
        for item in logged:
            item.replay(self._module)
