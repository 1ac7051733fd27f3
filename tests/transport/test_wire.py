"""Headers say what a message is, and a receiver refuses everything that it does not wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_afd.errors import AFDError, ProtocolError, StaleMessage
from lightning_afd.schedule.actions import Action
from lightning_afd.transport import wire
from lightning_afd.transport.base import CHANNELS, MAX_MICRO_BATCHES, micro_batch_of, name_of, tag_of
from lightning_afd.transport.wire import (
    HEADER_BYTES,
    Section,
    Stamp,
    allocate,
    expect,
    expect_dispatch,
    message_bytes,
    needed_bytes,
    read,
    too_small,
)

CPU = torch.device("cpu")
STAMP = Stamp(action=Action("D", 3, "f", 5), sender=2, step=11, map_version=1)
SECTIONS = (Section(7, 6, torch.bfloat16), Section(7, 2, torch.float32), Section(7, 2, torch.int32))
PLACE = r"message D3f5 \(layer 3, micro-batch 5\) from rank 2"


def message(stamp: Stamp = STAMP, sections: tuple[Section, ...] = SECTIONS) -> Tensor:
    """A message with recognisable rows."""
    buffer, views = allocate(stamp, sections, CPU)
    for number, view in enumerate(views):
        view.copy_(torch.arange(view.numel()).view_as(view) + 100 * number)
    return buffer


def set_field(buffer: Tensor, index: int, value: int) -> Tensor:
    buffer[:HEADER_BYTES].view(torch.int64)[index] = value
    return buffer


@pytest.mark.parametrize("dtype", wire._DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_sections_come_back_as_they_were_sent(dtype: torch.dtype, rows: int) -> None:
    sections = (Section(rows, 3, dtype), Section(rows, 5, torch.float64), Section(rows, 1, torch.int32))
    longer = torch.cat([message(STAMP, sections), torch.full((40,), 255, dtype=torch.uint8)])
    for buffer in (message(STAMP, sections), longer):
        views = read(buffer, STAMP)
        expect(views, sections, STAMP)
        assert needed_bytes(buffer, STAMP) == 0
        for number, view in enumerate(views):
            assert torch.equal(view.reshape(-1), (torch.arange(view.numel()) + 100 * number).to(view.dtype))


@pytest.mark.parametrize("name", ["D0f0", "C3f1", "A2b4095", "E700b2", "H1f1", "L2b0"])
def test_every_action_can_be_named(name: str) -> None:
    stamp = replace(STAMP, action=Action.parse(name))
    assert len(read(message(stamp), stamp)) == 3


def test_length_is_the_sum_of_aligned_sections() -> None:
    assert HEADER_BYTES == 160
    assert message_bytes([]) == 160
    assert message_bytes([Section(1, 1, torch.bfloat16)]) == 176
    assert message_bytes(SECTIONS) == 160 + 96 + 64 + 64 == message().numel()


@pytest.mark.parametrize(
    "change",
    [{"step": 10}, {"step": 12}, {"attempt": 1}, {"map_version": 2}, {"step": 9, "action": Action("D", 0, "f", 5)}],
)
def test_other_step_attempt_or_map_is_stale(change: dict[str, Any]) -> None:
    received = replace(STAMP, **change)
    with pytest.raises(StaleMessage, match=PLACE) as failure:
        read(message(received), STAMP)
    assert str(STAMP) in str(failure.value) and str(received) in str(failure.value)
    with pytest.raises(StaleMessage, match=PLACE):
        needed_bytes(message(received), STAMP)


@pytest.mark.parametrize(
    "change", [{"sender": 1}, *({"action": Action.parse(name)} for name in ("D2f5", "D3f4", "D3b5", "C3f5"))]
)
def test_other_sender_or_action_is_refused(change: dict[str, Any]) -> None:
    received = replace(STAMP, **change)
    with pytest.raises(ProtocolError, match=PLACE) as failure:
        read(message(received), STAMP)
    assert not isinstance(failure.value, StaleMessage)
    assert f"expected {STAMP}, received {received}" in str(failure.value)


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (message()[: HEADER_BYTES - 1], "a header of 160 bytes, received 159"),
        (torch.zeros(0, dtype=torch.uint8), "received 0 of torch.uint8"),
        (message().view(torch.int64), "a header of 160 bytes, received 48 of torch.int64"),
        (message()[:-1], "at most 383 bytes, received sections"),
        (torch.zeros(400, dtype=torch.uint8), "received other bytes"),
        (torch.full((400,), 255, dtype=torch.uint8), "received other bytes"),
        (set_field(message(), 4, 8), "a known action"),
        (set_field(message(), 4, -1), "a known action"),
        (set_field(message(), 5, 3), "a known action"),
        (set_field(message(), 13, 99), "a known dtype"),
        (set_field(message(), 11, -7), "received sections"),
        (set_field(message(), 12, 2**40), "received sections"),
        (set_field(message(), 13, 3), "received sections"),
    ],
)
def test_damaged_messages_are_refused(buffer: Tensor, words: str) -> None:
    with pytest.raises(ProtocolError, match=f"{PLACE}: expected .*") as failure:
        read(buffer, STAMP)
    assert words in str(failure.value)


@settings(derandomize=True, max_examples=300, deadline=None, database=None)
@given(
    length=st.integers(0, 383),
    words=st.lists(st.tuples(st.integers(0, HEADER_BYTES // 8 - 1), st.integers(-(2**63), 2**63 - 1)), max_size=3),
    whole=st.booleans(),
)
def test_a_message_with_any_damage_is_refused_or_means_the_same(
    length: int, words: list[tuple[int, int]], whole: bool
) -> None:
    """Words of the header that nobody needs may differ; nothing else than this package's errors may come out."""
    buffer = message()
    for index, value in words:
        set_field(buffer, index, value)
    try:
        views = read(buffer if whole else buffer[:length], STAMP)
        expect(views, SECTIONS, STAMP)
    except ProtocolError as error:
        assert str(error).startswith("message D3f5 (layer 3, micro-batch 5) from rank 2: expected")
        return
    assert whole
    for view, sent in zip(views, read(message(), STAMP), strict=True):
        assert torch.equal(view, sent)


@pytest.mark.parametrize(
    "other",
    [
        (Section(6, 6, torch.bfloat16), *SECTIONS[1:]),
        (Section(7, 5, torch.bfloat16), *SECTIONS[1:]),
        (Section(7, 6, torch.float16), *SECTIONS[1:]),
        SECTIONS[:2],
        (),
    ],
)
def test_answer_must_have_the_rows_that_were_asked_for(other: tuple[Section, ...]) -> None:
    with pytest.raises(ProtocolError, match=PLACE) as failure:
        expect(read(message(STAMP, other), STAMP), SECTIONS, STAMP)
    assert f"expected {list(SECTIONS)}, received {list(other)}" in str(failure.value)


@pytest.mark.parametrize(
    "other",
    [
        (Section(6, 6, torch.bfloat16), *SECTIONS[1:]),
        (*SECTIONS[:2], Section(6, 2, torch.int32)),
        (*SECTIONS[:2], Section(7, 3, torch.int32)),
        (*SECTIONS[:2], Section(7, 2, torch.int64)),
        SECTIONS[:2],
        (),
    ],
)
def test_sections_of_a_dispatch_must_agree(other: tuple[Section, ...]) -> None:
    expect_dispatch(read(message(), STAMP), STAMP)
    with pytest.raises(ProtocolError, match=f"{PLACE}: expected rows of x, weights and int32 ids, received"):
        expect_dispatch(read(message(STAMP, other), STAMP), STAMP)


def test_message_without_rows_asks_for_a_larger_buffer() -> None:
    request = too_small(STAMP, 5000, CPU)
    assert request.numel() == HEADER_BYTES
    assert needed_bytes(request, STAMP) == 5000
    for need in (-1, 100):
        with pytest.raises(ProtocolError, match=f"asks for a buffer of {need} bytes"):
            needed_bytes(too_small(STAMP, need, CPU), STAMP)


def test_errors_are_of_the_package() -> None:
    assert issubclass(StaleMessage, ProtocolError) and issubclass(ProtocolError, AFDError)


def test_tags_are_unique_on_a_channel_and_can_be_read() -> None:
    places = [(layer, m, part) for layer in (0, 1, 90) for m in (0, 1, MAX_MICRO_BATCHES - 1) for part in (0, 1)]
    tags = [tag_of(*place) for place in places]
    assert len(set(tags)) == len(places)
    assert [micro_batch_of(tag) for tag in tags] == [m for _, m, _ in places]
    assert CHANNELS == ("Df", "Cf", "Db", "Cb")
    assert name_of("Df", tag_of(90, 3)) == "D90f3"
    assert name_of("Cb", tag_of(1, 4095, 1)) == "C1b4095 (larger buffer)"
