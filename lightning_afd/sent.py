"""The handle of a dispatch: who got which rows, in what shapes and dtypes; combine and backward consume it.

Also what travels beside it: bases with their routes, hidden states with the pattern of router outputs, plain rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_afd.model.router_output import RouterOutput
from lightning_afd.model.routing import Route, empty_route
from lightning_afd.schedule.actions import Action, Phase
from lightning_afd.transport.link import Link, Parcel, Posted
from lightning_afd.transport.wire import Section, code_of, dtype_of, message_bytes


@dataclass(frozen=True, eq=False)
class Sent:
    """A dispatch of one layer and micro-batch."""

    route: Route
    width: int
    """H, columns of x."""
    top_k: int
    """K, columns of the w that was routed; without dedup one of them travels per copy."""
    x_dtype: torch.dtype
    w_dtype: torch.dtype

    def rows(self, count: int) -> Section:
        return Section(count, self.width, self.x_dtype)

    @property
    def columns(self) -> int:
        """Routing weights, and expert ids, of one copy."""
        return self.top_k if self.route.pair_C is None else 1

    def weights(self, count: int) -> Section:
        return Section(count, self.columns, self.w_dtype)

    def answer(self, phase: Phase, count: int) -> list[Section]:
        """What comes back for `count` rows: sums, or in backward the gradients of x and w."""
        return [self.rows(count)] if phase == "f" else [self.rows(count), self.weights(count)]

    def sections(self, count: int) -> tuple[Section, ...]:
        """x, w and local expert ids of `count` rows."""
        return (self.rows(count), self.weights(count), Section(count, self.columns, torch.int32))

    def sums_in(self, answers: Sequence[Posted]) -> list[Tensor]:
        """What F ranks return in forward, rank by rank."""
        return [answer.wait_for(self.answer("f", n))[0] for answer, n in zip(answers, self.route.counts, strict=True)]

    def gradients_in(self, answers: Sequence[Posted]) -> tuple[Tensor, Tensor]:
        """The gradients of x and w of each token out of what F ranks return in backward."""
        counted = zip(answers, self.route.counts, strict=True)
        parts = [answer.wait_for(self.answer("b", count)) for answer, count in counted]
        dx_TH = self.route.sum_copies([dx for dx, _ in parts], self.x_dtype)
        return dx_TH, self.route.sum_weights([dw for _, dw in parts], self.top_k, self.w_dtype)

    @property
    def most(self) -> int:
        """All copies that there can be for one F rank."""
        return self.route.tokens * (1 if self.route.pair_C is None else self.top_k)


def sent_by(route: Route, x_TH: Tensor, w_TK: Tensor) -> Sent:
    """The handle of a dispatch of these tensors."""
    return Sent(route, x_TH.shape[1], w_TK.shape[1], x_TH.dtype, w_TK.dtype)


def nothing_sent(ranks: int, device: torch.device) -> Sent:
    """The handle of a rank without rows."""
    return Sent(empty_route(ranks, device), 0, 0, torch.float32, torch.float32)


def send_copies(link: Link, action: Action, peers: Sequence[int], sent: Sent, rows: tuple[Tensor, Tensor]) -> None:
    """Send each F rank the copies of its tokens; `rows` are x [T, H] and w [T, K] of all."""
    x_TH, w_TK = rows
    route, most = sent.route, message_bytes(sent.sections(sent.most))
    w_rows, weight_C = route.weights(w_TK)
    parts = zip(*map(route.split, (route.token_C, weight_C, route.idx_CK)), strict=True)
    parcels: list[Parcel] = []
    for peer, (token_c, weight_c, idx_ck) in zip(peers, parts, strict=True):
        message, (x_cH, w_ck, ids_ck) = link.allocate(action, sent.sections(token_c.shape[0]))
        torch.index_select(x_TH, 0, token_c, out=x_cH)
        torch.index_select(w_rows, 0, weight_c, out=w_ck)
        ids_ck.copy_(idx_ck[:, : sent.columns])
        parcels.append((peer, message, most))
    link.send_all(action, parcels)


def send_gradients(link: Link, action: Action, peers: Sequence[int], sent: Sent, dY_TH: Tensor | None) -> None:
    """Send each F rank the gradients of what it has returned; None where no token was sent."""
    most = message_bytes([sent.rows(sent.most)])
    parcels: list[Parcel] = []
    for peer, token_c in zip(peers, sent.route.split(sent.route.token_C), strict=True):
        message, (dY_cH,) = link.allocate(action, [sent.rows(token_c.shape[0])])
        if dY_TH is not None:
            torch.index_select(dY_TH, 0, token_c, out=dY_cH)
        parcels.append((peer, message, most))
    link.send_all(action, parcels)


def pack_route(link: Link, action: Action, sent: Sent, base_TH: Tensor | None) -> Tensor:
    """A base hop: the base, the token of each copy, and shapes and counts, for whoever combines the layer."""
    route = sent.route
    figures = [sent.width, sent.top_k, code_of(sent.x_dtype), code_of(sent.w_dtype), route.tokens, *route.counts]
    base = torch.zeros(0, 0, device=link.device) if base_TH is None else base_TH.detach().reshape(-1, base_TH.shape[-1])
    sections = [
        Section(base.shape[0], base.shape[1], base.dtype),
        Section(route.token_C.shape[0], 1, torch.int64),
        Section(len(figures), 1, torch.int64, on_host=True),
    ]
    message, (view, token_view, figures_view) = link.allocate(action, sections)
    view.copy_(base)
    token_view.copy_(route.token_C[:, None])
    figures_view.copy_(torch.tensor(figures)[:, None])
    return message


def unpack_route(views: Sequence[Tensor], ranks: int) -> Sent:
    """The handle in a base hop's message; its local expert ids stay with the sender."""
    width, top_k, x_code, w_code, tokens, *counts = views[2].flatten().tolist()
    idx_CK = empty_route(ranks, views[1].device).idx_CK
    route = Route(tokens, views[1].flatten(), idx_CK, tuple(counts))
    return Sent(route, width, top_k, dtype_of(x_code), dtype_of(w_code))


def pack_hidden(link: Link, action: Action, h_TH: Tensor | None, routing: RouterOutput | None) -> Tensor:
    """The hidden states for a tail on another rank, and the pattern of the router outputs as text (bytes as int32)."""
    h = torch.zeros(0, 0, device=link.device) if h_TH is None else h_TH
    text = list("" if routing is None else routing.text().encode())
    sections = [Section(h.shape[0], h.shape[1], h.dtype), Section(len(text), 1, torch.int32, on_host=True)]
    message, (view, text_view) = link.allocate(action, sections)
    view.copy_(h)
    text_view.copy_(torch.tensor(text, dtype=torch.int32)[:, None])
    return message


def unpack_hidden(views: Sequence[Tensor]) -> tuple[Tensor, RouterOutput | None]:
    """Read `pack_hidden`."""
    text = bytes(views[1].flatten().tolist()).decode()
    return views[0], RouterOutput.parse(text, views[0].device) if text else None


def send_rows(link: Link, action: Action, receiver: int, tensor: Tensor | None) -> None:
    """Send a tensor as rows of its last dimension; None is a message without sections."""
    rows = [] if tensor is None else [tensor.detach().flatten(0, -2)]
    message, views = link.allocate(action, [Section(row.shape[0], row.shape[1], row.dtype) for row in rows])
    for view, row in zip(views, rows, strict=True):
        view.copy_(row)
    link.send(action, receiver, message, message.numel())
