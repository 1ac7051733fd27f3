"""What an F rank does for each action of its program: it gathers the rows of all replicas and runs experts.

The dispatch of layer l and the gradients for it belong to the A ranks of segment l, the sums to those of segment l + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.shared import WithShared
from lightning_afd.peers import Peers
from lightning_afd.receives import Receives
from lightning_afd.runtime import Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.tail_rank import TailRank
from lightning_afd.transport.link import Link, Parcel
from lightning_afd.transport.wire import Section


@dataclass(eq=False)
class _Gathered:
    """Rows of one (layer, micro-batch) from all A ranks, and what backward needs of them."""

    x: list[Section]
    w: list[Section]
    rows: tuple[Tensor, Tensor, Tensor] | None
    """x_TH, idx_TK, w_TK of all A ranks together; None where nobody sent a row, and once the experts have run."""
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
        messages = [posted.wait() for posted in self._receives.take(action)]
        self._link.release(action)
        x, w = ([_section(message[i]) for message in messages] for i in (0, 1))
        filled = [message for message in messages if message[0].shape[0]]
        rows = tuple(_cat([message[i] for message in filled]) for i in (0, 2, 1)) if filled else None
        self.received_rows += sum(section.rows for section in x)
        self._gathered[action.layer, action.micro_batch] = _Gathered(x, w, rows)  # type: ignore[arg-type]

    def _experts_forward(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        if item.rows is not None:
            y_TH, item.saved = self._shards[action.layer].forward(*item.rows, keep=self._training)
            item.rows = None
            item.out = _split([y_TH], item.x)
        else:
            item.out = [[] for _ in item.x]

    def _return_sums(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        self._answer(action, item, [[section] for section in item.x])
        if not self._training:
            del self._gathered[action.layer, action.micro_batch]

    def _gather_gradient(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        posted = zip(self._receives.take(action), item.x, strict=True)
        messages = [message.wait_for([section])[0] for message, section in posted]
        self._link.release(action)
        filled = [message for message in messages if message.shape[0]]
        item.dY_TH = _cat(filled) if filled else None

    def _experts_backward(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        if item.dY_TH is None:
            item.out = [[] for _ in item.x]
            return
        dx_TH, dw_TK, item.pending = self._shards[action.layer].backward(item.saved, item.dY_TH)
        item.saved = item.dY_TH = None
        item.out = _split([dx_TH, dw_TK], item.x)

    def _return_gradients(self, action: Action) -> None:
        item = self._gathered[action.layer, action.micro_batch]
        self._answer(action, item, [[x, w] for x, w in zip(item.x, item.w, strict=True)])
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

    def _answer(self, action: Action, item: _Gathered, sections: list[list[Section]]) -> None:
        segment = action.layer + (action.phase == "f")
        parcels: list[Parcel] = []
        for peer, wanted, tensors in zip(self._peers.attention_ranks(segment), sections, item.out, strict=True):
            if peer == self._link.rank and tensors and wanted[0].rows:
                self._link.hand_over(action, tensors)
                continue
            message, views = self._link.allocate(action, wanted)
            for view, tensor in zip(views, tensors, strict=False):
                if view.numel():  # an A rank without rows doesn't say how wide they would be
                    view.copy_(tensor)
            parcels.append((peer, message, message.numel() * 5 // 4))  # others may have more rows
        self._link.send_all(action, parcels)
        item.out = []


def _section(tensor: Tensor) -> Section:
    return Section(tensor.shape[0], tensor.shape[1], tensor.dtype)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(tensors: list[Tensor], sections: list[Section]) -> list[list[Tensor]]:
    """Divide rows of all A ranks among them again."""
    counts = [section.rows for section in sections]
    return [list(parts) for parts in zip(*(tensor.split(counts) for tensor in tensors), strict=True)]
