"""What several ranks send to an F rank for one layer and micro-batch, and get back from it in the same shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_afd.schedule.actions import Action, Phase
from lightning_afd.transport.link import Link, Parcel, Posted
from lightning_afd.transport.wire import Section

Rows = tuple[Tensor, Tensor, Tensor]
"""x_TH, idx_TK, w_TK of all senders together."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Sections of the dispatches, by sender."""

    x: list[Section]
    w: list[Section]

    @classmethod
    def take(cls, posted: Iterable[Posted]) -> tuple[Asked, Rows | None]:
        """Wait for dispatches; no rows where nobody sent any."""
        messages = [one.wait() for one in posted]
        x, w = ([_section(message[i]) for message in messages] for i in (0, 1))
        filled = [message for message in messages if message[0].shape[0]]
        if not filled:
            return cls(x, w), None
        x_TH, w_TK, idx_TK = (_cat([message[i] for message in filled]) for i in range(3))
        return cls(x, w), (x_TH, idx_TK, w_TK)

    @property
    def rows(self) -> int:
        """Of all senders together."""
        return sum(section.rows for section in self.x)

    def take_gradients(self, posted: Iterable[Posted]) -> Tensor | None:
        """Wait for the gradients of the sums, dY_TH."""
        messages = [one.wait_for([section])[0] for one, section in zip(posted, self.x, strict=True)]
        filled = [message for message in messages if message.shape[0]]
        return _cat(filled) if filled else None

    def split(self, tensors: Sequence[Tensor] | None) -> list[list[Tensor]]:
        """Divide rows of all senders among them again; None where nobody sent any."""
        if tensors is None:
            return [[] for _ in self.x]
        counts = [section.rows for section in self.x]
        return [list(parts) for parts in zip(*(tensor.split(counts) for tensor in tensors), strict=True)]

    def answer(self, link: Link, action: Action, peers: Sequence[int], parts: Sequence[Sequence[Tensor]]) -> None:
        """Send each of the ranks its part: sums, or in backward the gradients of x and w."""
        parcels: list[Parcel] = []
        for peer, wanted, tensors in zip(peers, self._answers(action.phase), parts, strict=True):
            if peer == link.rank and tensors and wanted[0].rows:
                link.hand_over(action, tensors)
                continue
            message, views = link.allocate(action, wanted)
            for view, tensor in zip(views, tensors, strict=False):
                if view.numel():  # an A rank without rows doesn't say how wide they would be
                    view.copy_(tensor)
            parcels.append((peer, message, message.numel() * 5 // 4))  # others may have more rows
        link.send_all(action, parcels)

    def _answers(self, phase: Phase) -> list[list[Section]]:
        if phase == "f":
            return [[section] for section in self.x]
        return [[x, w] for x, w in zip(self.x, self.w, strict=True)]


def _section(tensor: Tensor) -> Section:
    return Section(tensor.shape[0], tensor.shape[1], tensor.dtype)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
