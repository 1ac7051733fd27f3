"""What an F rank does for each action of its program: it gathers the rows of all replicas and runs experts.

The dispatch of layer l and the gradients for it belong to the A ranks of segment l, the sums to those of segment l + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_afd.asked import Asked, Rows
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.shared import WithShared
from lightning_afd.peers import Peers
from lightning_afd.receives import Receives
from lightning_afd.runtime import Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.tail_rank import TailRank
from lightning_afd.transport.link import Link


@dataclass(eq=False)
class _Gathered:
    """Rows of one (layer, micro-batch) from all A ranks, and what backward needs of them."""

    asked: Asked
    rows: Rows | None
    """None where nobody sent any, and once the experts have run."""
    saved: Any = None
    pending: Any = None
    out: list[list[Tensor]] = field(default_factory=list)
    """Answers per A rank, until they are sent."""
    dY_TH: Tensor | None = None
    ends: int = 2
    """What it still waits for in the end, in any order: its gradients sent, its weight gradient computed."""


class FFNRank:
    """State of one F rank during a step, and the handlers of its actions."""

    def __init__(
        self, link: Link, shards: Mapping[int, ExpertShard | WithShared], peers: Peers, tails: TailRank
    ) -> None:
        self.tails = tails
        self._link = link
        self._shards = shards
        self._peers = peers
        self._training = False
        self._receives: Receives
        self._gathered: dict[tuple[int, int], _Gathered] = {}
        self.received_rows = 0

    def begin(self, receives: Receives, *, training: bool) -> None:
        """Start a step."""
        self._receives, self._training = receives, training
        self.received_rows = 0

    def end(self) -> None:
        """Drop whatever is left, after the last action or an error."""
        self._gathered.clear()
        self.tails.end()

    @property
    def kernels(self) -> frozenset[str]:
        """What multiplies the rows of experts, as far as they have had any: "loop" or "grouped_mm"."""
        return frozenset(shard.kernel for shard in self._shards.values()) - {""}

    def handlers(self) -> Handlers:
        return {
            ("D", "f"): self._gather,
            ("E", "f"): self._experts_forward,
            ("C", "f"): self._return_sums,
            ("D", "b"): self._gather_gradient,
            ("E", "b"): self._experts_backward,
            ("C", "b"): self._return_gradients,
            ("E", "w"): self._weight_gradient,
            **self.tails.handlers(),
        }

    def _gather(self, action: Action) -> None:
        asked, rows = Asked.take(self._receives.take(action))
        self._link.release(action)
        self.received_rows += asked.rows
        self._gathered[action.layer, action.micro_batch] = _Gathered(asked, rows)

    def _experts_forward(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        if item.rows is not None:
            y_TH, item.saved = self._shards[action.layer].forward(*item.rows, keep=self._training)
            item.rows = None
            item.out = item.asked.split([y_TH])
        else:
            item.out = item.asked.split(None)

    def _return_sums(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        self._answer(action, item)
        if not self._training:
            del self._gathered[action.layer, action.micro_batch]

    def _gather_gradient(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        item.dY_TH = item.asked.take_gradients(self._receives.take(action))
        self._link.release(action)

    def _experts_backward(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        if item.dY_TH is None:
            item.out = item.asked.split(None)
            return
        dx_TH, dw_TK, item.pending = self._shards[action.layer].backward(item.saved, item.dY_TH)
        item.saved = item.dY_TH = None
        item.out = item.asked.split([dx_TH, dw_TK])

    def _return_gradients(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        self._answer(action, item)
        self._drop_at_end(action, item)

    def _weight_gradient(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        shard = self._shards[action.layer]
        if item.pending is None:
            shard.zero_missing_gradients()
        else:
            shard.weight_gradient(item.pending)
            item.pending = None
        self._drop_at_end(action, item)

    def _drop_at_end(self, action: Action, item: _Gathered) -> None:
        item.ends -= 1
        if not item.ends:
            del self._gathered[action.layer, action.micro_batch]

    def _answer(self, action: Action, item: _Gathered) -> None:
        segment = action.layer + (action.phase == "f")
        peers = self._peers.siblings if action.is_exchange else self._peers.attention_ranks(segment)
        item.asked.answer(self._link, action, peers, item.out)
        item.out = []
