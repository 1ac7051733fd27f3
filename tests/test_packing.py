"""Rows of documents and their division over ranks: pure numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_afd.errors import PlanError
from lightning_afd.packing import attention_work, deal, deal_plainly, imbalance, loads, rows_of_documents


def test_rows_are_full_and_keep_the_order() -> None:
    assert rows_of_documents([3, 4, 9, 0, 2], 4) == [(3, 1), (3, 1), (4,), (4,)]
    assert rows_of_documents([], 4) == []
    assert attention_work((3, 1)) == 10


@given(st.lists(st.integers(0, 50)), st.integers(1, 20))
def test_no_token_is_lost_before_the_last_row(lengths: list[int], seq_len: int) -> None:
    rows = rows_of_documents(lengths, seq_len)
    assert all(sum(row) == seq_len and min(row) > 0 for row in rows)
    assert len(rows) == sum(lengths) // seq_len


@given(ranks=st.integers(1, 6), share=st.integers(1, 8), data=st.data())
def test_every_item_goes_to_one_rank_and_no_rank_gets_more_work_than_by_plain_dealing(
    ranks: int, share: int, data: st.DataObject
) -> None:
    work = data.draw(st.lists(st.integers(1, 10**6), min_size=ranks * share, max_size=ranks * share))
    dealt = deal(work, ranks)
    assert [len(items) for items in dealt] == [share] * ranks
    assert sorted(item for items in dealt for item in items) == list(range(len(work)))
    assert max(loads(work, dealt)) <= max(loads(work, deal_plainly(len(work), ranks)))
    assert deal(list(work), ranks) == dealt
    assert 1.0 <= imbalance(work, dealt) <= ranks


def test_heavy_items_are_spread() -> None:
    work = [9, 1, 9, 1, 9, 1, 9, 1]
    assert imbalance(work, deal_plainly(8, 2)) == 1.8
    assert imbalance(work, deal(work, 2)) == 1.0


def test_plain_dealing_is_kept_where_the_heaviest_first_is_worse() -> None:
    work = [3, 2, 3, 2, 0, 2]  # heaviest first: 3 + 2 + 2 and 3 + 2 + 0
    assert loads(work, deal(work, 2)) == [6, 6]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: deal([1, 2, 3], 2), "3 items cannot be dealt to 2 ranks"),
        (lambda: rows_of_documents([3], 0), "seq_len=0: at least 1"),
    ],
)
def test_what_cannot_be_divided(call: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        call()  # type: ignore[operator]
