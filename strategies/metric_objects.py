"""Metrics of torchmetrics that user code logs: joined over the ranks that updated them, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchmetrics import Metric

from lightning_afd.engine import Engine

if TYPE_CHECKING:
    import lightning.pytorch as pl


class SharedMetric(Metric):
    """What all ranks log in the place of a metric of the module: the ranks where steps end compute it, together."""

    def __init__(self, metric: Metric, engine: Engine) -> None:
        super().__init__()
        self.__dict__["metric"] = metric  # as no part of this module
        self._engine = engine

    def update(self) -> None:
        """The user's code updates the metric itself."""

    def compute(self) -> Tensor:
        """Collective: the value over all batches of all A ranks."""
        mine = self.metric.compute().detach().cpu() if self._engine.has_tail else None
        value = self._engine.collectives.broadcast_object(mine, self._engine.plan.layout.tail_rank(0))
        assert isinstance(value, Tensor)
        return value.to(self.metric.device)

    def reset(self) -> None:
        """That of the metric."""
        self.metric.reset()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return compute  # the metric itself synchronises and caches


class MetricObjects:
    """The logged metrics of one fit or evaluation."""

    def __init__(self, module: pl.LightningModule, engine: Engine) -> None:
        self._module = module
        self._engine = engine
        self._shared: dict[str, SharedMetric] = {}

    def names(self) -> dict[int, str]:
        """Attribute names by identity."""
        return {id(part): name for name, part in self._module.named_modules() if isinstance(part, Metric)}

    def shared(self, attribute: str, step_value: Tensor | None) -> SharedMetric:
        """The stand-in of a metric of the module, with the value of the step at hand."""
        if attribute not in self._shared:
            metric = self._module.get_submodule(attribute)
            assert isinstance(metric, Metric)
            self._shared[attribute] = SharedMetric(metric, self._engine)
        made = self._shared[attribute]
        made._forward_cache = step_value
        return made

    def compute_together(self) -> None:
        """Collective, before code runs on some ranks only: what it may read from the Trainer is computed by then."""
        if self._shared:
            _ = self._module.trainer.callback_metrics
