"""Each (token, slot) pair goes to the one rank that owns its expert, and sums come back to the tokens they are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_afd.expert_map import ExpertMap
from lightning_afd.model.routing import Route, Router, empty_route

CPU = torch.device("cpu")


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertMap, int, Tensor]:
    """Any expert map, ranks without experts included, and any choice of experts [T, K]."""
    ranks = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=9))
    tokens, k = draw(st.integers(0, 8)), draw(st.integers(1, 4))
    expert = st.integers(0, len(owners) - 1)
    rows = draw(st.lists(st.lists(expert, min_size=k, max_size=k), min_size=tokens, max_size=tokens))
    idx_TK = torch.tensor(rows, dtype=draw(st.sampled_from([torch.int64, torch.int32]))).reshape(tokens, k)
    return ExpertMap(tuple(owners)), ranks, idx_TK


def pieces(route: Route) -> list[tuple[Tensor, Tensor]]:
    """Tokens and local expert ids per rank."""
    return list(zip(route.split(route.token_C), route.split(route.idx_CK), strict=True))


@given(cases())
def test_each_slot_belongs_to_the_owner_of_its_expert_and_to_nobody_else(case: tuple[ExpertMap, int, Tensor]) -> None:
    expert_map, ranks, idx_TK = case
    route = Router(expert_map, ranks, CPU).route(idx_TK)
    assert route.tokens == len(idx_TK) and len(route.counts) == ranks
    assert (route.token_C.dtype, route.idx_CK.dtype) == (torch.int64, torch.int32)
    claimed = torch.full(idx_TK.shape, -1)
    for rank, (token_c, local_ck) in enumerate(pieces(route)):
        own = expert_map.rank_to_experts(rank)
        for token, local in zip(token_c.tolist(), local_ck.tolist(), strict=True):
            assert any(slot >= 0 for slot in local)  # nothing travels in vain
            for slot, expert in enumerate(local):
                if expert >= 0:
                    assert claimed[token, slot] == -1
                    claimed[token, slot] = own[expert]
    assert torch.equal(claimed, idx_TK.long())


@given(cases())
def test_copies_are_distinct_and_in_token_order(case: tuple[ExpertMap, int, Tensor]) -> None:
    expert_map, ranks, idx_TK = case
    route = Router(expert_map, ranks, CPU).route(idx_TK)
    for rank, (token_c, _) in enumerate(pieces(route)):
        hit = {t for t, row in enumerate(idx_TK.tolist()) if any(expert_map.expert_to_rank[e] == rank for e in row)}
        assert token_c.tolist() == sorted(hit)
    assert sum(route.counts) == len(route.token_C)


@given(cases())
def test_sums_of_copies_undo_the_dispatch(case: tuple[ExpertMap, int, Tensor]) -> None:
    """Each rank returns, per copy, the sum of f(x) of the slots that are its own: the token's sum over all slots."""
    expert_map, ranks, idx_TK = case
    x_TH = torch.arange(len(idx_TK) * 3, dtype=torch.float64).reshape(-1, 3) + 1
    scale_E = torch.arange(expert_map.experts, dtype=torch.float64) + 2
    route = Router(expert_map, ranks, CPU).route(idx_TK)
    parts = []
    for rank, (token_c, local_ck) in enumerate(pieces(route)):
        scale_e = torch.cat([scale_E[list(expert_map.rank_to_experts(rank))], torch.zeros(1, dtype=torch.float64)])
        parts.append(x_TH[token_c] * scale_e[local_ck.long()].sum(1, keepdim=True))
    expected = x_TH * scale_E[idx_TK.long()].sum(1, keepdim=True)
    assert torch.equal(route.sum_copies(parts, torch.float64), expected)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32)]
)
def test_sums_are_kept_in_float32(dtype: torch.dtype, kept: torch.dtype) -> None:
    """1 + 2^-10 is no bfloat16."""
    route = Router(ExpertMap((0, 1)), 2, CPU).route(torch.tensor([[0, 1]]))
    out = route.sum_copies([torch.ones(1, 1, dtype=dtype), torch.full((1, 1), 2.0**-10, dtype=dtype)], dtype)
    assert out.dtype == kept and out.item() == 1 + 2.0**-10


def test_empty_route_has_a_message_for_each_rank() -> None:
    route = empty_route(3, CPU)
    assert (route.tokens, route.counts) == (0, (0, 0, 0))
    assert [len(token_c) for token_c, _ in pieces(route)] == [0, 0, 0]
    assert route.sum_copies([torch.zeros(0, 7)] * 3, torch.float32).shape == (0, 7)


def test_unknown_expert_is_an_error() -> None:
    with pytest.raises(IndexError):
        Router(ExpertMap((0, 1)), 2, CPU).route(torch.tensor([[2]]))


@given(cases())
def test_one_of_the_ranks_that_a_token_visits_computes_its_shared_experts(case: tuple[ExpertMap, int, Tensor]) -> None:
    expert_map, ranks, idx_TK = case
    plain, route = (Router(expert_map, ranks, CPU, shared=shared).route(idx_TK) for shared in (False, True))
    assert torch.equal(route.token_C, plain.token_C) and route.counts == plain.counts
    assert torch.equal(route.idx_CK[:, :-1], plain.idx_CK) and route.idx_CK.dtype == torch.int32
    marks_C = route.idx_CK[:, -1]
    assert set(marks_C.tolist()) <= {0, -1}
    assert sorted(route.token_C[marks_C == 0].tolist()) == list(range(route.tokens))


def test_ffn_ranks_take_turns_with_shared_experts() -> None:
    idx_TK = torch.randint(0, 16, (4000, 4), generator=torch.Generator().manual_seed(0))
    route = Router(ExpertMap.contiguous(16, 4), 4, CPU, shared=True).route(idx_TK)
    computed = [int((part[:, -1] == 0).sum()) for part in route.split(route.idx_CK)]
    assert sum(computed) == 4000 and max(computed) < 1.1 * 1000
