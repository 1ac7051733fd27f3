"""Which token goes to which F rank: one copy of a token per F rank, however many of its experts it hits.

Shapes: T tokens, H hidden, K experts per token, N F ranks of the group, C = sum of copies (token, F rank). Without
dedup there is one copy per expert, as in a plain all-to-all: C = T * K copies (token, slot), each with one expert.

How many copies there are, only the device knows at first. So routing has two parts, between which other work can be
launched; nothing in either waits for the device but for the counts (no nonzero, mask index, unique or bincount).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_afd.device import HostValues, places_of
from lightning_afd.expert_map import ExpertMap

Capacity = Literal["counted", "full"]
CAPACITIES: tuple[Capacity, ...] = ("counted", "full")
"""Which tokens travel to an F rank: those that have to, which somebody must count, or all."""


@dataclass(frozen=True, eq=False)
class Route:
    """The handle that dispatch makes and combine consumes: the copies of one micro-batch's tokens, by F rank."""

    tokens: int
    token_C: Tensor
    """Token of each copy (int64); copies of F rank 0 come first, in token order."""
    idx_CK: Tensor
    """Local expert ids of the copy's F rank, -1 for slots that belong to other ranks (int32).

    Where F ranks compute shared experts a slot follows: 0 where this copy's rank does so for the token, else -1.
    """
    counts: tuple[int, ...]
    """Copies per F rank."""
    pair_C: Tensor | None = None
    """Without dedup: for which (token, slot) pair each copy is, as token * K + slot (int64)."""

    def split(self, rows_C: Tensor) -> list[Tensor]:
        """Rows per F rank."""
        return list(rows_C.split(self.counts))

    def weights(self, w_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of weights that may travel, and which of them goes with each copy: a token's, or its slot's."""
        return (w_TK, self.token_C) if self.pair_C is None else (w_TK.reshape(-1, 1), self.pair_C)

    def sum_weights(self, parts: Sequence[Tensor], top_k: int, dtype: torch.dtype) -> Tensor:
        """Put what the F ranks returned for the weights of copies together to the gradient of w_TK."""
        if self.pair_C is None:
            return self.sum_copies(parts, dtype)
        out_TK = torch.zeros(self.tokens, top_k, dtype=dtype, device=self.token_C.device)
        out_TK.view(-1)[self.pair_C] = torch.cat(list(parts))[:, 0]
        return out_TK

    def sum_copies(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Add what the F ranks returned, [counts[n], W] each, to one row per token [T, W], in F rank order.

        Sums of 16-bit rows are kept in float32.
        """
        dtype = torch.float32 if dtype.itemsize < 4 else dtype
        out_TW = torch.zeros(self.tokens, parts[0].shape[1], dtype=dtype, device=self.token_C.device)
        for token_c, part in zip(self.token_C.split(self.counts), parts, strict=True):
            out_TW.index_add_(0, token_c, part.to(dtype))
        return out_TW


class Routing:
    """A route whose copies are being counted on the device."""

    def __init__(self, counts: HostValues | None, finish: Callable[[tuple[int, ...]], Route]) -> None:
        """`counts` gives the copies per F rank; None where they are known beforehand."""
        self._counts = counts
        self._finish = finish

    @property
    def is_counted(self) -> bool:
        """Whether `finish` would not have to wait."""
        return self._counts is None or self._counts.are_there()

    @property
    def mark(self) -> Any:
        """The event (HostValues.mark) behind everything that the routing was made of."""
        return None if self._counts is None else self._counts.mark

    def finish(self) -> Route:
        """Wait for the counts, and for nothing else that the device does."""
        return self._finish(() if self._counts is None else tuple(self._counts.wait()))


class Router:
    """Routes by one expert map; the tables live on the device of the tokens.

    With `shared` one of the F ranks that a token visits computes its shared experts, too: they take turns.
    """

    def __init__(
        self, expert_map: ExpertMap, ranks: int, device: torch.device, *, shared: bool = False, dedup: bool = True
    ) -> None:
        assert dedup or not shared, "a token's ranks take turns, not its slots"
        self.device = device
        self._ranks = ranks
        self._shared = shared
        self._dedup = dedup
        self._owner_E = torch.tensor(expert_map.expert_to_rank, device=device)
        self._local_E = torch.tensor(expert_map.local_ids(), dtype=torch.int32, device=device)

    def route(self, idx_TK: Tensor) -> Route:
        """Route tokens by their experts `idx_TK` (global ids)."""
        return self.begin(idx_TK).finish()

    def begin(self, idx_TK: Tensor) -> Routing:
        """The first part of `route`, which does not wait for the device."""
        owner_TK = self._owner_E[idx_TK]
        if not self._dedup:
            return self._begin_slots(idx_TK, owner_TK)
        hit_NT = self._hits(owner_TK)
        tokens, top_k = idx_TK.shape
        most = tokens * min(self._ranks, top_k)
        rank_C, token_C = places_of(hit_NT, most).unbind(1)

        def finish(counts: tuple[int, ...]) -> Route:
            copies = rank_C[: sum(counts)], token_C[: sum(counts)]
            return Route(tokens, copies[1], self._local_ids(idx_TK, owner_TK, hit_NT, copies), counts)

        return Routing(HostValues(hit_NT.sum(1)), finish)

    def _hits(self, owner_TK: Tensor) -> Tensor:
        """Which F ranks each token visits [N, T]."""
        hit_NT = torch.zeros(self._ranks, len(owner_TK), dtype=torch.bool, device=owner_TK.device)
        return hit_NT.scatter_(0, owner_TK.t(), True)

    def _local_ids(self, idx_TK: Tensor, owner_TK: Tensor, hit_NT: Tensor, copies: tuple[Tensor, Tensor]) -> Tensor:
        """Route.idx_CK of these copies (rank, token)."""
        rank_C, token_C = copies
        foreign_CK = owner_TK.index_select(0, token_C) != rank_C[:, None]
        idx_CK = self._local_E[idx_TK].index_select(0, token_C).masked_fill_(foreign_CK, -1)
        return torch.cat([idx_CK, _turns(hit_NT)[rank_C, token_C, None]], 1) if self._shared else idx_CK

    def _begin_slots(self, idx_TK: Tensor, owner_TK: Tensor) -> Routing:
        """One copy per (token, slot)."""
        tokens, top_k = idx_TK.shape
        owner_S = owner_TK.flatten()
        pair_C = owner_S.argsort(stable=True)
        idx_C1 = self._local_E[idx_TK.flatten()[pair_C], None]
        counts_N = (owner_S == torch.arange(self._ranks, device=owner_S.device)[:, None]).sum(1)
        token_C = pair_C // top_k  # here, as what `finish` launches is beside the stream that uses it later
        return Routing(HostValues(counts_N), lambda counts: Route(tokens, token_C, idx_C1, counts, pair_C))


class FullRouter(Router):
    """Sends each token to every F rank, so that nobody counts, or waits for, those that have to travel.

    Where a rank has none of a token's experts it finds foreign slots only, and its sum is 0.
    """

    def begin(self, idx_TK: Tensor) -> Routing:
        owner_TK, tokens = self._owner_E[idx_TK], len(idx_TK)
        rank_NT = torch.arange(self._ranks, device=idx_TK.device)[:, None].expand(-1, tokens)
        token_NT = torch.arange(tokens, device=idx_TK.device).expand(self._ranks, -1)
        copies = rank_NT.reshape(-1), token_NT.reshape(-1)
        idx_CK = self._local_ids(idx_TK, owner_TK, self._hits(owner_TK), copies)
        route = Route(tokens, copies[1], idx_CK, (tokens,) * self._ranks)
        return Routing(None, lambda _: route)


class NodeRouter(Router):
    """Routes on to the F ranks of a node what has come to one: ids are local ones of the node, -1 goes nowhere."""

    def __init__(self, expert_map: ExpertMap, ranks: int, device: torch.device, *, shared: bool = False) -> None:
        super().__init__(expert_map, ranks, device, shared=shared)
        # behind the last expert, where -1 points to, is one of a rank that does not exist
        self._owner_E = torch.cat([self._owner_E, self._owner_E.new_tensor([ranks])])
        self._local_E = torch.cat([self._local_E, self._local_E.new_tensor([-1])])

    def route(self, idx_TK: Tensor) -> Route:
        """Route the rows of a dispatch by its ids; with shared experts for those alone whose last slot says so."""
        if not self._shared:
            return super().route(idx_TK)
        route = super().route(idx_TK[:, :-1])
        turn_C1 = torch.minimum(route.idx_CK[:, -1:], idx_TK[route.token_C, -1:])
        return replace(route, idx_CK=torch.cat([route.idx_CK[:, :-1], turn_C1], 1))

    def _hits(self, owner_TK: Tensor) -> Tensor:
        hit_NT = torch.zeros(self._ranks + 1, len(owner_TK), dtype=torch.bool, device=owner_TK.device)
        return hit_NT.scatter_(0, owner_TK.t(), True)[:-1]


def _turns(hit_NT: Tensor) -> Tensor:
    """0 where a rank is the one of those hit by the token whose turn it is, token t's number t mod their count."""
    turn_T = torch.arange(hit_NT.shape[1], device=hit_NT.device) % hit_NT.sum(0).clamp_min(1)
    return (hit_NT & (hit_NT.cumsum(0) - 1 == turn_T)).int() - 1


def empty_route(ranks: int, device: torch.device) -> Route:
    """The route of a rank that has no rows for a micro-batch: zero-row messages to every F rank."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return Route(0, none, torch.zeros(0, 1, dtype=torch.int32, device=device), (0,) * ranks)
