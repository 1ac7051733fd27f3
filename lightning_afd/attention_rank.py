"""What an A rank does for each action of its program: attention, dispatch to F ranks, combine of their sums.

Whoever runs segment l + 1 combines layer l and dispatches its gradient. attention_hops.py is about other A ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_afd.attention_hops import AttentionHops
from lightning_afd.device import SideStream
from lightning_afd.expert_load import ExpertCounts
from lightning_afd.in_flight import InFlight
from lightning_afd.model.coroutine import Host, Segment
from lightning_afd.model.routing import Router, Routing
from lightning_afd.peers import Peers
from lightning_afd.receives import Receives
from lightning_afd.runtime import Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.segments import MicroBatch, UserStep
from lightning_afd.sent import Sent, nothing_sent, send_copies, send_gradients, sent_by
from lightning_afd.tail_rank import refuse_unfilled
from lightning_afd.transport.link import Link


class AttentionRank:
    """State of one A rank during a step, and the handlers of its actions."""

    def __init__(self, link: Link, host: Host, routers: dict[int, Router], peers: Peers, counts: ExpertCounts) -> None:
        self._link = link
        self._host = host
        self._routers = routers
        self._peers = peers
        self._counts = counts
        self._shape = peers.shape
        self._hops = AttentionHops(link, peers)
        self._side = SideStream(link.device)
        self._training = False
        self._flight: list[InFlight] = []
        self._receives: Receives
        self.results: list[Any] = []
        self.tokens = 0
        """Tokens that this rank has brought to the step; counted on A group 0."""
        self.z_losses: list[Tensor] = []
        """Weighted router z-losses of own layers, per micro-batch."""

    def begin(self, steps: Sequence[UserStep], micro_batches: int, receives: Receives, *, training: bool) -> None:
        """Take the user's steps of this batch; micro-batches beyond them have no rows on this rank."""
        self._receives = receives
        self._training = training
        self.tokens = 0
        self.z_losses = []
        segments = self._peers.owned_segments
        layers, split = self._shape.layers, self._shape.split_attention
        works = [MicroBatch(self._host, step, layers, segments, input_first=split) for step in steps]
        self._flight = [InFlight(work, work.put_off) for work in works]
        self._flight += [InFlight(None) for _ in range(micro_batches - len(works))]
        self._hops.begin(self._flight, receives, training=training)
        self.results = [None] * len(works)

    def end(self) -> None:
        """Drop whatever is left, after the last action or an error."""
        for flight in self._flight:
            flight.finish()
        self.z_losses = [z_loss for flight in self._flight for z_loss in flight.z_losses]
        self._flight = []

    def settle(self) -> None:
        """Behind a step: raise what the device has found wrong (Host.refuse_if)."""
        self._host.settle()

    def handlers(self) -> Handlers:
        return {
            ("A", "f"): self._attention_forward,
            ("D", "f"): self._dispatch,
            ("C", "f"): self._combine,
            ("A", "b"): self._attention_backward,
            ("A", "w"): self._attention_weights,
            ("D", "b"): self._dispatch_gradient,
            ("C", "b"): self._combine_gradient,
            **self._hops.handlers(),
        }

    # -- forward --------------------------------------------------------------------------------------------------

    def _attention_forward(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        y_TH, base_TH = self._arrived(action.layer - 1, flight)
        if flight.work is None:
            return
        if self._peers.hands_over(action):
            assert y_TH is not None
            flight.h_TH = flight.work.hand_over(y_TH, base_TH)
        else:
            flight.segment = flight.work.forward(action.layer, y_TH, base_TH)
            flight.routing = self._begin_routing(action.layer, flight.segment)
            self.results[action.micro_batch] = flight.work.result
        if not self._training and action.layer == self._peers.segments[-1] and not self._peers.hands_over(action):
            flight.finish()

    def _begin_routing(self, layer: int, segment: Segment | None) -> Routing | None:
        """Let the device find out, right behind the segment, where its tokens go."""
        if segment is None:
            return None
        assert segment.idx_TK is not None
        if self._training:
            self._counts.add(layer, segment.idx_TK)
        return self._routers[layer].begin(segment.idx_TK)

    def would_wait(self, action: Action) -> bool:
        """Whether an action would keep the host until the device has counted the rows of a dispatch."""
        if (action.op, action.phase) != ("D", "f"):
            return False
        routing = self._flight[action.micro_batch].routing
        return routing is not None and not routing.is_counted

    def _dispatch(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        routing, flight.routing = flight.routing, None
        # Rows for this rank itself are used on the main stream, and must lie in memory that it gives out.
        mark = None if routing is None or self._peers.layout.collocated else routing.mark
        with self._side.behind(mark):
            self._send_rows(action, flight, routing)
        if not self._shape.hops(action.layer) and not self._shape.sends_logits(action.layer):
            flight.segment = None

    def _send_rows(self, action: Action, flight: InFlight, routing: Routing | None) -> None:
        sent, x_TH, w_TK = self._routed(action.layer, flight.segment, routing)
        flight.sent[action.layer] = sent
        self.tokens += sent.route.tokens if action.layer == 0 else 0
        send_copies(self._link, action, self._peers.expert_ranks(action.layer), sent, (x_TH, w_TK))

    def _combine(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        answers, sent = self._receives.take(action), flight.sent.get(action.layer)
        if sent is None:  # the route comes with the base, later
            flight.sums = [answer.wait()[0] for answer in answers]
        else:
            flight.sums = sent.sums_in(answers)
        self._link.release(action)

    def _arrived(self, layer: int, flight: InFlight) -> tuple[Tensor | None, Tensor | None]:
        """The sums of a layer's experts per token, and its base where another rank computed it."""
        if layer < 0:
            return None, None
        sent, base_TH = flight.sent[layer], flight.base_TH
        y_TH = sent.route.sum_copies(flight.sums, sent.x_dtype)
        flight.sums, flight.base_TH = [], None
        if not self._training:
            del flight.sent[layer]
        return y_TH, base_TH

    # -- backward -------------------------------------------------------------------------------------------------

    def _attention_backward(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        if flight.work is None:
            return
        if self._peers.hands_over(action):
            assert flight.dh_TH is not None
            flight.gradients, flight.dh_TH = flight.work.take_back(flight.dh_TH), None
            return
        if action.layer == self._shape.layers:
            flight.gradients = flight.work.tail_backward()
            self.results[action.micro_batch] = flight.work.result
            refuse_unfilled(flight.work.stand_ins, self._shape)
            return
        assert flight.dx_TH is not None and flight.dw_TK is not None and flight.dh_TH is not None
        flight.gradients = flight.work.backward(action.layer, flight.dx_TH, flight.dw_TK, flight.dh_TH)
        flight.dx_TH = flight.dw_TK = flight.dh_TH = None
        if action.layer == self._peers.segments[0]:
            flight.finish()

    def _attention_weights(self, action: Action) -> None:
        """Weight gradients that the segment's backward has put off; nothing where it ran as a whole."""
        put_off = self._flight[action.micro_batch].put_off.pop(action.layer, None)
        if put_off is not None:
            with self._host.backward():
                put_off.run()

    def _dispatch_gradient(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        hops = self._shape.hops(action.layer)
        sent = flight.sent.pop(action.layer) if hops else flight.sent[action.layer]
        dY_TH = None if flight.gradients is None else flight.gradients.dY_TH.to(sent.x_dtype)
        send_gradients(self._link, action, self._peers.expert_ranks(action.layer), sent, dY_TH)
        if not hops:
            flight.dh_TH = None if flight.gradients is None else flight.gradients.dh_TH
            flight.gradients = None

    def _combine_gradient(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        sent = flight.sent.pop(action.layer)
        flight.dx_TH, flight.dw_TK = sent.gradients_in(self._receives.take(action))
        self._link.release(action)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _routed(self, layer: int, segment: Segment | None, routing: Routing | None) -> tuple[Sent, Tensor, Tensor]:
        """Where a segment's tokens go, and the tensors whose rows travel: x [T, H] and w [T, K]."""
        if segment is None or routing is None:
            device = self._routers[layer].device
            nothing = torch.zeros(0, 0, device=device)
            return nothing_sent(len(self._peers.expert_ranks(layer)), device), nothing, nothing
        assert segment.x_TH is not None and segment.w_TK is not None
        x_TH, w_TK = segment.x_TH.detach(), segment.w_TK.detach()
        if segment.wire_dtype is not None:
            x_TH = x_TH.to(segment.wire_dtype)
        return sent_by(routing.finish(), x_TH, w_TK), x_TH, w_TK
