"""What an A rank does for each action of its program: attention, dispatch to F ranks, combine of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_afd.model.port import Host, Segment
from lightning_afd.model.routing import Route, Router, empty_route
from lightning_afd.runtime import Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.segments import MicroBatch, UserStep
from lightning_afd.transport.link import Link, Posted
from lightning_afd.transport.wire import Section, message_bytes


@dataclass(eq=False)
class _InFlight:
    """A micro-batch and what it waits for; `work` is None where this rank has no rows for it."""

    work: MicroBatch | None
    routes: dict[int, _Sent] = field(default_factory=dict)
    posted: list[Posted] = field(default_factory=list)
    segment: Segment | None = None
    y_TH: Tensor | None = None
    dY_TH: Tensor | None = None
    dx_TH: Tensor | None = None
    dw_TK: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Sent:
    """A dispatch of one layer: its route and the shapes and dtypes on the wire."""

    route: Route
    width: int
    top_k: int
    x_dtype: torch.dtype
    w_dtype: torch.dtype

    def rows(self, count: int) -> Section:
        return Section(count, self.width, self.x_dtype)

    def weights(self, count: int) -> Section:
        return Section(count, self.top_k, self.w_dtype)

    def sections(self, count: int) -> tuple[Section, ...]:
        return (self.rows(count), self.weights(count), Section(count, self.top_k, torch.int32))


class AttentionRank:
    """State of one A rank during a step, and the handlers of its actions."""

    def __init__(self, link: Link, host: Host, routers: Sequence[Router], f_ranks: Sequence[int]) -> None:
        self._link = link
        self._host = host
        self._routers = tuple(routers)
        self._layers = len(self._routers)
        self._f_ranks = tuple(f_ranks)
        self._training = False
        self._flight: list[_InFlight] = []
        self.results: list[Any] = []
        self.tokens = 0
        """Tokens that this rank has routed in the step."""

    def begin(self, steps: Sequence[UserStep], micro_batches: int, *, training: bool) -> None:
        """Take the user's steps of this batch; micro-batches beyond them have no rows on this rank."""
        self._training = training
        self.tokens = 0
        works = [MicroBatch(self._host, step) for step in steps]
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
        }

    def _attention_forward(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        if flight.work is None:
            return
        y_TH, flight.y_TH = flight.y_TH, None
        flight.segment = flight.work.forward(action.layer, self._layers, y_TH)
        if action.layer == self._layers:
            self.results[action.micro_batch] = flight.work.result
            if not self._training:
                self._finish(flight)

    def _dispatch(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        sent, rows = self._route(action.layer, flight.segment)
        flight.segment = None
        flight.routes[action.layer] = sent
        self.tokens += sent.route.tokens if action.layer == 0 else 0
        answer = Action("C", action.layer, "f", action.micro_batch)
        counts = sent.route.counts
        flight.posted = [
            self._link.post(answer, peer, [sent.rows(n)]) for peer, n in zip(self._f_ranks, counts, strict=True)
        ]
        most = message_bytes(sent.sections(sent.route.tokens))
        token_parts = sent.route.split(sent.route.token_C)
        idx_parts = sent.route.split(sent.route.idx_CK)
        for peer, token_c, idx_ck in zip(self._f_ranks, token_parts, idx_parts, strict=True):
            message, views = self._link.allocate(action, sent.sections(token_c.shape[0]))
            for view, tensor_T in zip(views, rows, strict=False):
                torch.index_select(tensor_T, 0, token_c, out=view)
            views[2].copy_(idx_ck[:, : sent.top_k])
            self._link.send_dispatch(action, peer, message, most)

    def _combine(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        sent = flight.routes[action.layer]
        posted, flight.posted = flight.posted, []
        parts = [answer.wait()[0] for answer in posted]
        self._link.release(action.micro_batch)
        flight.y_TH = sent.route.sum_copies(parts, sent.x_dtype)
        if not self._training:
            del flight.routes[action.layer]

    def _attention_backward(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        if flight.work is None:
            return
        if action.layer == self._layers:
            dh = flight.work.tail_backward(self._layers)
            self.results[action.micro_batch] = flight.work.result
        else:
            assert flight.dx_TH is not None and flight.dw_TK is not None
            dh = flight.work.backward(action.layer, flight.dx_TH, flight.dw_TK)
            flight.dx_TH = flight.dw_TK = None
        if dh is None:
            self._finish(flight)
        else:
            flight.dY_TH = dh.reshape(-1, dh.shape[-1])

    def _dispatch_gradient(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        sent = flight.routes[action.layer]
        answer = Action("C", action.layer, "b", action.micro_batch)
        flight.posted = [
            self._link.post(answer, peer, [sent.rows(n), sent.weights(n)])
            for peer, n in zip(self._f_ranks, sent.route.counts, strict=True)
        ]
        for peer, token_c in zip(self._f_ranks, sent.route.split(sent.route.token_C), strict=True):
            message, (dY_cH,) = self._link.allocate(action, [sent.rows(token_c.shape[0])])
            if flight.dY_TH is not None:
                torch.index_select(flight.dY_TH.to(sent.x_dtype), 0, token_c, out=dY_cH)
            self._link.send(action, peer, message)
        flight.dY_TH = None

    def _combine_gradient(self, action: Action) -> None:
        flight = self._flight[action.micro_batch]
        sent = flight.routes.pop(action.layer)
        posted, flight.posted = flight.posted, []
        parts = [answer.wait() for answer in posted]
        self._link.release(action.micro_batch)
        flight.dx_TH = sent.route.sum_copies([dx for dx, _ in parts], sent.x_dtype)
        flight.dw_TK = sent.route.sum_copies([dw for _, dw in parts], sent.w_dtype)

    def _route(self, layer: int, segment: Segment | None) -> tuple[_Sent, tuple[Tensor, ...]]:
        """Route a segment's tokens; returns the handle and the tensors whose rows travel (x, w)."""
        router = self._routers[layer]
        if segment is None:
            route = empty_route(len(self._f_ranks), router.device)
            nothing = torch.zeros(0, 0, device=router.device)
            return _Sent(route, 0, 0, nothing.dtype, nothing.dtype), (nothing, nothing)
        assert segment.x_TH is not None and segment.idx_TK is not None and segment.w_TK is not None
        x_TH, w_TK = segment.x_TH.detach(), segment.w_TK.detach()
        route = router.route(segment.idx_TK)
        if segment.wire_dtype is not None:
            x_TH = x_TH.to(segment.wire_dtype)
        return _Sent(route, x_TH.shape[1], w_TK.shape[1], x_TH.dtype, w_TK.dtype), (x_TH, w_TK)

    def _finish(self, flight: _InFlight) -> None:
        assert flight.work is not None
        flight.work.close()
        flight.work = None
        flight.routes.clear()
