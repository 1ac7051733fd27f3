"""Where F ranks run the tails of steps: an attention rank sends them its batch and gets back what the step returned.

Once per step and pair, as pickled objects through the CPU; batches come from any loader, so they must be picklable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_afd.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Work:
    """The micro-batches that a data replica brings to one step."""

    args: Sequence[tuple[Any, ...]]
    """Arguments of the user's step, by micro-batch."""
    weights: Sequence[float]
    seeds: Sequence[int | None]
    loss_scale: float = 1.0
    """Factor of the losses under a loss scaler."""


NOTHING = Work(args=(), weights=(), seeds=())


class TailErrands:
    """One rank's end of the way between an attention rank and the F rank that runs its tails."""

    def __init__(self, engine: Engine, move: Callable[[Any], Any]) -> None:
        layout = engine.plan.layout
        self._transport = engine.collectives
        self._move = move  # to this rank's device
        self._asks = [layout.tail_rank(layout.index_of(engine.rank))] if engine.leads and not engine.has_tail else []
        self._serves = [] if engine.is_attention else [layout.first_rank(a) for a in engine.replicas_of_tails]

    def pass_on(self, work: Work) -> list[Work]:
        """Send this rank's work, if its tail is elsewhere; returns what others ask of this rank, by replica."""
        for rank in self._asks:
            self._transport.send_object(_packed(vars(work)), rank)
        return [Work(**self._received(rank)) for rank in self._serves]

    def bring_back(self, own: list[Any], tails: Sequence[list[Any]]) -> list[Any]:
        """Send back what the tails of this rank returned; returns what this rank's own steps returned."""
        for rank, results in zip(self._serves, tails, strict=True):
            self._transport.send_object(_packed(results), rank)
        for rank in self._asks:
            own = self._received(rank)
        return own

    def _received(self, rank: int) -> Any:
        return self._move(self._transport.receive_object(rank))


def _packed(value: Any) -> Any:
    """Tensors as they can be pickled: on the CPU, alone in their storage, without graph."""
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().cpu().clone())
