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
from lightning_afd.transport.link import Link
from lightning_afd.transport.wire import Section, code_of, dtype_of


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
