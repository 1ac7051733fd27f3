"""What the strategy knows of the experts' loads: it moves their biases against them, and tells who asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_afd.engine import Engine
from lightning_afd.model.expert_bias import find_biases, kept_in_float32
from lightning_afd.model.split import MoELayer
from lightning_afd.strategies.gradient_norm import GradientNorm
from lightning_afd.strategies.scaler import loss_scale
from lightning_afd.transport.base import Incoming


class ExpertBalance:
    """Counts of the last accumulation window, one exchange per window where biases move, else one per question.

    All ranks hear all counts and move what they hold of the biases, so that copies of a bias stay equal.
    """

    def __init__(self, engine: Engine, layers: Sequence[MoELayer]) -> None:
        """Raises PlanError where biases shall move and no layer has one."""
        self._engine = engine
        self._rate = engine.plan.expert_bias_rate
        self._biases = find_biases(layers) if self._rate else ()
        self._pending: Incoming | None = None
        self._told: Tensor | None = None

    def kept_in_float32(self) -> AbstractContextManager[None]:
        """Context in which the model changes its dtype, and biases that move do not."""
        return kept_in_float32(self._biases)

    def count(self) -> None:
        """Count from now on."""
        self._engine.expert_counts.enabled = True

    def end_window(self) -> None:
        """Collective where biases move: the last batch of a window has run, the optimizer step is about to follow."""
        counts = self._engine.expert_counts
        counts.end_window()
        self._told = None
        if self._biases:
            self._pending = counts.start_sum(self._engine.collectives)

    def loads(self) -> tuple[Tensor, ...]:
        """Collective unless biases move: tokens per expert of each MoE layer in the last window, of all ranks."""
        counts = self._engine.expert_counts
        if self._told is None:
            pending, self._pending = self._pending or counts.start_sum(self._engine.collectives), None
            self._told = pending.wait()
        return counts.by_layer(self._told)

    def around(self, step: Callable[[], Any], precision: Any, norm: GradientNorm) -> Any:
        """Make an optimizer step, and move the biases behind it unless nobody made it."""
        if not self._biases:
            return step()
        scale = loss_scale(precision, 1)
        made = step()
        skipped = norm.skipped or loss_scale(precision, 1) < scale  # a scale falls where a step is left out, only there
        loads = self.loads()
        for bias in () if skipped else self._biases:
            bias.move(loads[bias.layer], self._rate)
        return made
