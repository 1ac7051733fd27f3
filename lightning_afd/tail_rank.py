"""What an F rank does for the tails that it runs: trailing layers, norm, head and loss of some data replicas.

For each of their micro-batches it runs the user's step from its start, past all layers (they live elsewhere), to its
end. A group 0 sends the hidden states behind the last layer (H) and gets their gradient back; router logits come from
the A ranks of their layers (L).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_afd.errors import PlanError
from lightning_afd.model.coroutine import Host
from lightning_afd.model.router_output import RouterOutput
from lightning_afd.peers import Peers
from lightning_afd.receives import Receives
from lightning_afd.runtime import Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Shape
from lightning_afd.segments import MicroBatch, UserStep
from lightning_afd.sent import send_rows, unpack_hidden
from lightning_afd.transport.link import Link


@dataclass(eq=False)
class _Tail:
    """One micro-batch of one replica; `work` is None where the replica has no rows for it."""

    work: MicroBatch | None
    h_TH: Tensor | None = None
    routing: RouterOutput | None = None
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Router logits that have arrived, by layer."""
    dh_TH: Tensor | None = None


class TailRank:
    """State of the tails on one F rank during a step, and the handlers of their actions."""

    def __init__(self, link: Link, host: Host, peers: Peers) -> None:
        self._link = link
        self._host = host
        self._peers = peers
        self._training = False
        self._replicas = peers.layout.tails_of(link.rank) if peers.shape.hands_over() else ()
        self._tails: dict[tuple[int, int], _Tail] = {}
        self._receives: Receives
        self.results: list[list[Any]] = []
        """What the steps returned, by replica of this rank and micro-batch."""

    def begin(
        self, steps: Sequence[Sequence[UserStep]], micro_batches: int, receives: Receives, *, training: bool
    ) -> None:
        """Take the user's steps of the replicas; micro-batches beyond them have no rows."""
        self._receives = receives
        assert len(steps) == len(self._replicas), "each replica of this rank brings its steps"
        self._training = training
        layers, segments = self._peers.shape.layers, self._peers.owned_segments
        self._tails = {(replica, m): _Tail(None) for replica in self._replicas for m in range(micro_batches)}
        for replica, mine in zip(self._replicas, steps, strict=True):
            for m, step in enumerate(mine):
                self._tails[replica, m].work = MicroBatch(self._host, step, layers, segments)
        self.results = [[None] * len(mine) for mine in steps]

    def end(self) -> None:
        """Drop whatever is left, after the last action or an error."""
        for tail in self._tails.values():
            _close(tail)
        self._tails = {}

    def handlers(self) -> Handlers:
        return {
            ("H", "f"): self._take_hidden,
            ("L", "f"): self._take_logits,
            ("T", "f"): self._forward,
            ("T", "b"): self._backward,
            ("H", "b"): self._return_gradient,
            ("L", "b"): self._return_logits_gradient,
        }

    def _take_hidden(self, action: Action) -> None:
        for tail, views in self._received(action):
            tail.h_TH, tail.routing = unpack_hidden(views)

    def _take_logits(self, action: Action) -> None:
        for tail, views in self._received(action):
            if views:
                tail.logits[action.layer] = views[0]

    def _forward(self, action: Action) -> None:
        for number, (_, tail) in enumerate(self._of(action)):
            if tail.work is None:
                continue
            tail.work.start(tail.routing)
            for layer, logits_TE in tail.logits.items():
                tail.work.fill_in(layer, logits_TE)
            tail.logits.clear()
            tail.work.forward(action.layer, None, tail.h_TH)
            tail.h_TH = None
            self.results[number][action.micro_batch] = tail.work.result
            if not self._training:
                _close(tail)

    def _backward(self, action: Action) -> None:
        for number, (_, tail) in enumerate(self._of(action)):
            if tail.work is not None:
                tail.dh_TH = tail.work.tail_backward().dh_TH
                self.results[number][action.micro_batch] = tail.work.result
                refuse_unfilled(tail.work.stand_ins, self._peers.shape)

    def _return_gradient(self, action: Action) -> None:
        for replica, tail in self._of(action):
            dh_TH = torch.zeros(0, 0, device=self._link.device) if tail.dh_TH is None else tail.dh_TH
            send_rows(self._link, action, self._peers.counterparts(action, replica)[1], dh_TH)
            tail.dh_TH = None

    def _return_logits_gradient(self, action: Action) -> None:
        for replica, tail in self._of(action):
            leaf = None if tail.work is None else tail.work.stand_ins.get(action.layer)
            gradient_TE = None if leaf is None else leaf.grad
            send_rows(self._link, action, self._peers.counterparts(action, replica)[1], gradient_TE)

    def _received(self, action: Action) -> list[tuple[_Tail, list[Tensor]]]:
        """The message for each replica of this rank."""
        posted = self._receives.take(action)
        return [(tail, message.wait()) for (_, tail), message in zip(self._of(action), posted, strict=True)]

    def _of(self, action: Action) -> list[tuple[int, _Tail]]:
        """The replicas of this rank with their part of an action."""
        return [(replica, self._tails[replica, action.micro_batch]) for replica in self._replicas]


def refuse_unfilled(stand_ins: Mapping[int, Tensor], shape: Shape) -> None:
    """Raise PlanError where the loss uses router logits of other ranks that were not sent."""
    for layer, leaf in stand_ins.items():
        if leaf.grad is not None and not shape.sends_logits(layer):
            raise PlanError(
                f"the loss uses router logits of MoE layer {layer}, which lives on other ranks: set "
                "output_router_logits=True in the model's config before the fit, or use groups=1 and "
                "head='attention'"
            )


def _close(tail: _Tail) -> None:
    if tail.work is not None:
        tail.work.close()
        tail.work = None
