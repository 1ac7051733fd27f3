"""What an A rank does for each action of its program: attention, dispatch to F ranks, combine of their sums.

With several groups it also passes the base of its layers to the same replica of the next A group (H). Whoever runs
segment l + 1 combines layer l and dispatches its gradient. Router logits go to the rank that runs the tail (L); where
that is an F rank, A group 0 passes the hidden states behind the last layer on to it (H).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_afd.expert_load import ExpertCounts
from lightning_afd.model.coroutine import Host, Segment
from lightning_afd.model.routing import Router
from lightning_afd.peers import Peers
from lightning_afd.runtime import Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.segments import Gradients, MicroBatch, UserStep
from lightning_afd.sent import Sent, nothing_sent, pack_hidden, pack_route, send_rows, sent_by, unpack_route
from lightning_afd.tail_rank import refuse_unfilled
from lightning_afd.transport.link import Arriving, Link
from lightning_afd.transport.wire import message_bytes


@dataclass(eq=False)
class _InFlight:
    """A micro-batch and what has arrived for it; `work` is None where this rank has no rows for it."""

    work: MicroBatch | None
    segment: Segment | None = None
    sent: dict[int, Sent] = field(default_factory=dict)
    """Routes of own layers, and of the layers before own segments."""
    posted: dict[Action, list[Arriving]] = field(default_factory=dict)
    base_TH: Tensor | None = None
    h_TH: Tensor | None = None
    """Hidden states for a tail on another rank."""
    sums: list[Tensor] = field(default_factory=list)
    """What each F rank returned for the layer before the next own segment."""
    gradients: Gradients | None = None
    dh_TH: Tensor | None = None
    dx_TH: Tensor | None = None
    dw_TK: Tensor | None = None


class AttentionRank:
    """State of one A rank during a step, and the handlers of its actions."""

    def __init__(self, link: Link, host: Host, routers: dict[int, Router], peers: Peers, counts: ExpertCounts) -> None:
        self._link = link
        self._host = host
        self._routers = routers
        self._peers = peers
        self._counts = counts
        self._shape = peers.shape
        self._replica = peers.layout.index_of(link.rank)
        self._training = False
        self._flight: list[_InFlight] = []
        self.results: list[Any] = []
        self.tokens = 0
        """Tokens that this rank has brought to the step; counted on A group 0."""
        self.z_losses: list[Tensor] = []
        """Weighted router z-losses of own layers, per micro-batch."""

    def begin(self, steps: Sequence[UserStep], micro_batches: int, *, training: bool) -> None:
        """Take the user's steps of this batch; micro-batches beyond them have no rows on this rank."""
        self._training = training
        self.tokens = 0
        self.z_losses = []
        segments = self._peers.owned_segments
        works = [MicroBatch(self._host, step, self._shape.layers, segments) for step in steps]
        self._flight = [_InFlight(work) for work in works]
        self._flight += [_InFlight(None) for _ in range(micro_batches - len(works))]
        self.results = [None] * len(works)

    def end(self) -> None:
        """Drop whatever is left, after the last action or an error."""
        for flight in self._flight:
            if flight.work is not None:
                flight.work.close()
        self._flight = []

    def handlers(self) -> Handlers:
        return {
            ("A", "f"): self._attention_forward,
            ("D", "f"): self._dispatch,
            ("C", "f"): self._combine,
            ("A", "b"): self._attention_backward,
            ("D", "b"): self._dispatch_gradient,
            ("C", "b"): self._combine_gradient,
            ("H", "f"): self._hop_or_hand_over,
            ("H", "b"): self._hop_gradient,
            ("L", "f"): self._logits,
            ("L", "b"): self._logits_gradient,
        }

    # -- forward --------------------------------------------------------------------------------------------------

    def _attention_forward(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        y_TH, base_TH = self._arrived(action.layer - 1, flight)
        if flight.work is None:
            return
        if self._hands_over(action):
            assert y_TH is not None
            flight.h_TH = flight.work.hand_over(y_TH, base_TH)
        else:
            flight.segment = flight.work.forward(action.layer, y_TH, base_TH)
            self.results[action.micro_batch] = flight.work.result
        if not self._training and action.layer == self._peers.segments[-1] and not self._hands_over(action):
            self._finish(flight)

    def _dispatch(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        sent, x_TH, w_TK = self._route(action.layer, flight.segment)
        flight.sent[action.layer] = sent
        self.tokens += sent.route.tokens if action.layer == 0 else 0
        if not self._shape.hops(action.layer):
            self._post_combine(action.layer, action.micro_batch)
        route, most = sent.route, message_bytes(sent.largest())
        w_rows, weight_C = route.weights(w_TK)
        parts = zip(*map(route.split, (route.token_C, weight_C, route.idx_CK)), strict=True)
        for peer, (token_c, weight_c, idx_ck) in zip(self._peers.expert_ranks(action.layer), parts, strict=True):
            message, (x_cH, w_ck, ids_ck) = self._link.allocate(action, sent.sections(token_c.shape[0]))
            torch.index_select(x_TH, 0, token_c, out=x_cH)
            torch.index_select(w_rows, 0, weight_c, out=w_ck)
            ids_ck.copy_(idx_ck[:, : sent.columns])
            self._link.send_dispatch(action, peer, message, most)
        if not self._shape.hops(action.layer) and not self._shape.sends_logits(action.layer):
            flight.segment = None

    def _combine(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        if self._shape.hops(action.layer):  # the route comes with the base hop, perhaps later
            peers = self._peers.expert_ranks(action.layer)
            answers = [self._link.post_dispatch(action, peer) for peer in peers]
            flight.sums = [answer.wait()[0] for answer in answers]
        else:
            flight.sums = [answer.wait()[0] for answer in flight.posted.pop(action)]
        self._link.release(action)

    def _arrived(self, layer: int, flight: _InFlight) -> tuple[Tensor | None, Tensor | None]:
        """The sums of a layer's experts per token, and its base where another rank computed it."""
        if layer < 0:
            return None, None
        sent, base_TH = flight.sent[layer], flight.base_TH
        y_TH = sent.route.sum_copies(flight.sums, sent.x_dtype)
        flight.sums, flight.base_TH = [], None
        if not self._training:
            del flight.sent[layer]
        return y_TH, base_TH

    def _hands_over(self, action: Action) -> bool:
        """Whether an A or H action is about hidden states for a tail on an F rank."""
        return action.layer == self._shape.layers and self._shape.hands_over()

    def _hop_or_hand_over(self, action: Action) -> None:
        if self._hands_over(action):
            self._hand_over(action)
        else:
            self._hop(action)

    def _hand_over(self, action: Action) -> None:
        """Send the hidden states behind the last layer to the rank that runs the tail."""
        flight = self._flight[action.micro_batch]
        _, receiver = self._peers.counterparts(action, self._replica)
        routing = None if flight.work is None else flight.work.routing
        message = pack_hidden(self._link, action, flight.h_TH, routing)
        self._link.send_dispatch(action, receiver, message, message.numel())
        flight.h_TH = None
        if not self._training:
            self._finish(flight)

    def _hop(self, action: Action) -> None:
        """Pass the base and the route of an own layer on, or take those of the layer before an own segment."""
        flight = self._flight[action.micro_batch]
        sender, receiver = self._peers.counterparts(action, self._replica)
        if sender == self._link.rank:
            sent = flight.sent[action.layer]
            base_TH = None if flight.segment is None else flight.segment.base
            message = pack_route(self._link, action, sent, base_TH)
            self._link.send_dispatch(action, receiver, message, message.numel())
            if not self._shape.sends_logits(action.layer):
                flight.segment = None
            if not self._training:
                del flight.sent[action.layer]
            return
        views = self._link.post_dispatch(action, sender).wait()
        self._link.release(action)
        flight.base_TH = views[0]
        flight.sent[action.layer] = unpack_route(views, self._peers.ffn)

    def _logits(self, action: Action) -> None:
        """Pass router logits of an own layer to the tail, or take those of another group's layer."""
        flight = self._flight[action.micro_batch]
        sender, receiver = self._peers.counterparts(action, self._replica)
        if sender == self._link.rank:
            send_rows(self._link, action, receiver, None if flight.segment is None else flight.segment.routed)
            flight.segment = None
            return
        views = self._link.post_dispatch(action, sender).wait()
        if flight.work is not None and views:
            flight.work.fill_in(action.layer, views[0])

    # -- backward -------------------------------------------------------------------------------------------------

    def _attention_backward(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        if flight.work is None:
            return
        if self._hands_over(action):
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
            self._finish(flight)

    def _dispatch_gradient(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        hops = self._shape.hops(action.layer)
        sent = flight.sent.pop(action.layer) if hops else flight.sent[action.layer]
        if not hops:
            self._post_combine_gradient(action.layer, action.micro_batch)
        dY_TH = None if flight.gradients is None else flight.gradients.dY_TH.to(sent.x_dtype)
        peers = self._peers.expert_ranks(action.layer)
        for peer, token_c in zip(peers, sent.route.split(sent.route.token_C), strict=True):
            message, (dY_cH,) = self._link.allocate(action, [sent.rows(token_c.shape[0])])
            if dY_TH is not None:
                torch.index_select(dY_TH, 0, token_c, out=dY_cH)
            self._link.send(action, peer, message)
        if not hops:
            flight.dh_TH = None if flight.gradients is None else flight.gradients.dh_TH
            flight.gradients = None

    def _combine_gradient(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        if self._shape.hops(action.layer):
            self._post_combine_gradient(action.layer, action.micro_batch)
        sent = flight.sent[action.layer]
        parts = [answer.wait() for answer in flight.posted.pop(action)]
        self._link.release(action)
        flight.dx_TH = sent.route.sum_copies([dx for dx, _ in parts], sent.x_dtype)
        flight.dw_TK = sent.route.sum_weights([dw for _, dw in parts], sent.top_k, sent.w_dtype)
        del flight.sent[action.layer]

    def _hop_gradient(self, action: Action) -> None:
        """Pass the gradient of another group's base back, or take that of an own layer's."""
        flight = self._flight[action.micro_batch]
        sender, receiver = self._peers.counterparts(action, self._replica)
        if sender == self._link.rank:
            dh_TH = torch.zeros(0, 0, device=self._link.device) if flight.gradients is None else flight.gradients.dh_TH
            send_rows(self._link, action, receiver, dh_TH)
            flight.gradients = None
            return
        flight.dh_TH = self._link.post_dispatch(action, sender).wait()[0]
        self._link.release(action)

    def _logits_gradient(self, action: Action) -> None:
        """Pass the gradient of another group's router logits back, or take that of an own layer's."""
        flight = self._flight[action.micro_batch]
        sender, receiver = self._peers.counterparts(action, self._replica)
        if sender == self._link.rank:
            leaf = None if flight.work is None else flight.work.stand_ins.get(action.layer)
            send_rows(self._link, action, receiver, None if leaf is None else leaf.grad)
            return
        views = self._link.post_dispatch(action, sender).wait()
        leaf = None if flight.work is None else flight.work.logits_leaf(action.layer)
        if views and leaf is not None:
            leaf.grad = views[0].clone().view_as(leaf)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _post_combine(self, layer: int, micro_batch: int) -> None:
        action = Action("C", layer, "f", micro_batch)
        flight = self._flight[micro_batch]
        sent = flight.sent[layer]
        flight.posted[action] = [
            self._link.post(action, peer, [sent.rows(count)])
            for peer, count in zip(self._peers.expert_ranks(layer), sent.route.counts, strict=True)
        ]

    def _post_combine_gradient(self, layer: int, micro_batch: int) -> None:
        action = Action("C", layer, "b", micro_batch)
        flight = self._flight[micro_batch]
        sent = flight.sent[layer]
        flight.posted[action] = [
            self._link.post(action, peer, [sent.rows(count), sent.weights(count)])
            for peer, count in zip(self._peers.expert_ranks(layer), sent.route.counts, strict=True)
        ]

    def _route(self, layer: int, segment: Segment | None) -> tuple[Sent, Tensor, Tensor]:
        """Route a segment's tokens; returns the handle and the tensors whose rows travel: x [T, H] and w [T, K]."""
        router = self._routers[layer]
        if segment is None:
            nothing = torch.zeros(0, 0, device=router.device)
            return nothing_sent(self._peers.ffn, router.device), nothing, nothing
        assert segment.x_TH is not None and segment.idx_TK is not None and segment.w_TK is not None
        x_TH, w_TK = segment.x_TH.detach(), segment.w_TK.detach()
        if self._training:
            self._counts.add(layer, segment.idx_TK)
        if segment.wire_dtype is not None:
            x_TH = x_TH.to(segment.wire_dtype)
        return sent_by(router.route(segment.idx_TK), x_TH, w_TK), x_TH, w_TK

    def _finish(self, flight: _InFlight) -> None:
        if flight.work is not None:
            self.z_losses += flight.work.z_losses
            flight.work.close()
            flight.work = None
