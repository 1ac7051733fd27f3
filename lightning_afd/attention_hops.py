"""What an A rank exchanges with other A ranks and with tails on F ranks, always for the same data replica.

With several groups it passes the base of its layers to the next A group (H). Router logits go to the rank that runs the
tail (L); where that is an F rank, A group 0 passes the hidden states behind the last layer on to it (H).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_afd.in_flight import InFlight
from lightning_afd.peers import Peers
from lightning_afd.receives import Receives
from lightning_afd.runtime import Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.sent import pack_hidden, pack_route, send_rows, unpack_route
from lightning_afd.transport.link import Link


class AttentionHops:
    """The handlers of H and L, each for the rank that sends and the one that receives."""

    def __init__(self, link: Link, peers: Peers) -> None:
        self._link = link
        self._peers = peers
        self._shape = peers.shape
        self._training = False
        self._flight: Sequence[InFlight] = ()
        self._receives: Receives

    def begin(self, flight: Sequence[InFlight], receives: Receives, *, training: bool) -> None:
        """Take the micro-batches of a step."""
        self._flight, self._receives, self._training = flight, receives, training

    def handlers(self) -> Handlers:
        return {
            ("H", "f"): self._hop_or_hand_over,
            ("H", "b"): self._hop_gradient,
            ("L", "f"): self._logits,
            ("L", "b"): self._logits_gradient,
        }

    def _hop_or_hand_over(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        if self._peers.hands_over(action):
            self._hand_over(action, flight)
        elif self._peers.receives(action):
            self._take_base(action, flight)
        else:
            self._pass_base(action, flight)

    def _hand_over(self, action: Action, flight: InFlight) -> None:
        """Send the hidden states behind the last layer to the rank that runs the tail."""
        routing = None if flight.work is None else flight.work.routing
        message = pack_hidden(self._link, action, flight.h_TH, routing)
        self._link.send(action, self._peers.receiver(action), message, message.numel())
        flight.h_TH = None
        if not self._training:
            flight.finish()

    def _pass_base(self, action: Action, flight: InFlight) -> None:
        """Pass the base and the route of an own layer on."""
        sent = flight.sent[action.layer]
        base_TH = None if flight.segment is None else flight.segment.base
        message = pack_route(self._link, action, sent, base_TH)
        self._link.send(action, self._peers.receiver(action), message, message.numel())
        if not self._shape.sends_logits(action.layer):
            flight.segment = None
        if not self._training:
            del flight.sent[action.layer]

    def _take_base(self, action: Action, flight: InFlight) -> None:
        """Take those of the layer before an own segment."""
        views = self._arrived(action)
        self._link.release(action)
        flight.base_TH = views[0]
        flight.sent[action.layer] = unpack_route(views, len(self._peers.expert_ranks(action.layer)))

    def _logits(self, action: Action) -> None:
        """Pass router logits of an own layer to the tail, or take those of another group's layer."""
        flight = self._flight[action.micro_batch]
        if not self._peers.receives(action):
            logits = None if flight.segment is None else flight.segment.routed
            send_rows(self._link, action, self._peers.receiver(action), logits)
            flight.segment = None
            return
        views = self._arrived(action)
        if flight.work is not None and views:
            flight.work.fill_in(action.layer, views[0])

    def _hop_gradient(self, action: Action) -> None:
        """Pass the gradient of another group's base back, or take that of an own layer's."""
        flight = self._flight[action.micro_batch]
        if not self._peers.receives(action):
            dh_TH = torch.zeros(0, 0, device=self._link.device) if flight.gradients is None else flight.gradients.dh_TH
            send_rows(self._link, action, self._peers.receiver(action), dh_TH)
            flight.gradients = None
            return
        flight.dh_TH = self._arrived(action)[0]
        self._link.release(action)

    def _logits_gradient(self, action: Action) -> None:
        """Pass the gradient of another group's router logits back, or take that of an own layer's."""
        flight = self._flight[action.micro_batch]
        if not self._peers.receives(action):
            leaf = None if flight.work is None else flight.work.stand_ins.get(action.layer)
            send_rows(self._link, action, self._peers.receiver(action), None if leaf is None else leaf.grad)
            return
        views = self._arrived(action)
        leaf = None if flight.work is None else flight.work.logits_leaf(action.layer)
        if views and leaf is not None:
            leaf.grad = views[0].clone().view_as(leaf)

    def _arrived(self, action: Action) -> list[Tensor]:
        (posted,) = self._receives.take(action)
        return posted.wait()
