"""The wire format: an int64 header and up to three aligned sections in one flat uint8 message.

gloo checks neither size nor dtype of a message, and NCCL not its meaning, so every header says what it belongs to and
what it carries, and the receiver compares before it touches a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_afd.errors import ProtocolError, StaleMessage
from lightning_afd.schedule.actions import Action

MAGIC = 0x4C41464431
SECTIONS = 3
FIELDS = 11 + 3 * SECTIONS
HEADER_BYTES = 8 * FIELDS
ALIGNMENT = 16

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
_ON_HOST = 32
"""Added to the number of a dtype where a section travels with an announcement."""
_OPS = "ADECHLXY"
_PHASES = "fbw"


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a message belongs to; the receiver knows its own and compares."""

    action: Action
    sender: int
    """Global rank."""
    step: int
    """Counts the batches of this run."""
    attempt: int = 0
    map_version: int = 0
    """Version of the expert map by which rows were routed."""


@dataclass(frozen=True)
class Section:
    """Shape [rows, columns] and dtype of one tensor of a message."""

    rows: int
    columns: int
    dtype: torch.dtype
    on_host: bool = field(default=False, compare=False)
    """Whether the receiver needs the values on its host; where messages are announced, the announcement has them."""

    @property
    def nbytes(self) -> int:
        raw = self.rows * self.columns * self.dtype.itemsize
        return -(-raw // ALIGNMENT) * ALIGNMENT


def message_bytes(sections: Sequence[Section]) -> int:
    """Length of a message with these sections."""
    return _start() + sum(section.nbytes for section in sections)


def allocate(stamp: Stamp, sections: Sequence[Section], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A new message with its header filled in, and views of its sections to write rows into."""
    message = torch.empty(message_bytes(sections), dtype=torch.uint8, device=device)
    message[:HEADER_BYTES] = _header(stamp, sections, need=0).view(torch.uint8).to(device)
    return message, views(message, sections, _start())


def announce(stamp: Stamp, sections: Sequence[Section]) -> tuple[Tensor, list[Tensor]]:
    """A message on the host that says what another one will carry, and views of the sections that go with it."""
    carried = [section for section in sections if section.on_host]
    message = torch.empty(message_bytes(carried), dtype=torch.uint8)
    message[:HEADER_BYTES] = _header(stamp, sections, need=0).view(torch.uint8)
    return message, views(message, carried, _start())


def read_announcement(message: Tensor, expected: Stamp) -> tuple[list[Section], list[Tensor]]:
    """The sections that it announces, and those among them that it carries; errors are those of `read`."""
    fields = _fields(message, expected)
    _compare(fields, expected)
    sections = _sections(fields, expected)
    carried = [section for section in sections if section.on_host]
    _check_sizes(sections, message_bytes(carried), message.numel(), expected)
    return sections, views(message, carried, _start())


def too_small(stamp: Stamp, need: int, device: torch.device) -> Tensor:
    """A message without rows that asks the receiver for a buffer of `need` bytes; the real one follows."""
    return _header(stamp, (), need=need).view(torch.uint8).to(device)


def needed_bytes(message: Tensor, expected: Stamp) -> int:
    """Bytes that the sender asks for, or 0 where this message is the real one."""
    fields = _fields(message, expected)
    _compare(fields, expected)
    if fields[10] and fields[10] < HEADER_BYTES:
        raise _error(expected, f"a message, received one that asks for a buffer of {fields[10]} bytes")
    return fields[10]


def read(message: Tensor, expected: Stamp) -> list[Tensor]:
    """Views [rows, columns] of the sections, after the header has been compared with what the receiver waits for.

    Raises StaleMessage where step, attempt or expert-map version differ and ProtocolError for any other difference.
    """
    fields = _fields(message, expected)
    _compare(fields, expected)
    sections = _sections(fields, expected)
    _check_sizes(sections, message_bytes(sections), message.numel(), expected)
    return views(message, sections, _start())


def views(message: Tensor, sections: Sequence[Section], start: int = 0) -> list[Tensor]:
    """The sections [rows, columns] of a flat uint8 tensor that lie one behind the other from byte `start` on."""
    found = []
    for section in sections:
        raw = section.rows * section.columns * section.dtype.itemsize
        found.append(message[start : start + raw].view(section.dtype).view(section.rows, section.columns))
        start += section.nbytes
    return found


def expect(views: Sequence[Tensor], sections: Sequence[Section], expected: Stamp) -> None:
    """Compare the sections of a reply with the rows that were asked for; raises ProtocolError."""
    got = [Section(view.shape[0], view.shape[1], view.dtype) for view in views]
    if got != list(sections):
        raise _error(expected, f"{list(sections)}, received {got}")


def expect_dispatch(views: Sequence[Tensor], expected: Stamp) -> None:
    """Compare the sections of a dispatch with one another: x, w, int32 ids, equal rows; raises ProtocolError."""
    shapes = [(tuple(view.shape), view.dtype) for view in views]
    same_rows = len({view.shape[0] for view in views}) == 1
    if len(views) != SECTIONS or not same_rows or views[1].shape != views[2].shape or views[2].dtype != torch.int32:
        raise _error(expected, f"rows of x, weights and int32 ids, received {shapes}")


def code_of(dtype: torch.dtype) -> int:
    """The number of a dtype on the wire."""
    return _DTYPES.index(dtype)


def dtype_of(code: int) -> torch.dtype:
    """The dtype of a number on the wire."""
    return _DTYPES[code]


def _start() -> int:
    return -(-HEADER_BYTES // ALIGNMENT) * ALIGNMENT


def _header(stamp: Stamp, sections: Sequence[Section], need: int) -> Tensor:
    action = stamp.action
    fields = [MAGIC, stamp.step, stamp.attempt, stamp.map_version, _OPS.index(action.op), _PHASES.index(action.phase)]
    fields += [action.layer, action.micro_batch, stamp.sender, len(sections), need]
    for section in sections:
        fields += [section.rows, section.columns, code_of(section.dtype) + _ON_HOST * section.on_host]
    fields += [0, 0, -1] * (SECTIONS - len(sections))
    return torch.tensor(fields, dtype=torch.int64)


def _fields(message: Tensor, expected: Stamp) -> list[int]:
    if message.dtype != torch.uint8 or message.numel() < HEADER_BYTES:
        raise _error(expected, f"a header of {HEADER_BYTES} bytes, received {message.numel()} of {message.dtype}")
    return message[:HEADER_BYTES].view(torch.int64).tolist()


def _sections(fields: list[int], expected: Stamp) -> list[Section]:
    """What a header lists."""
    listed = zip(fields[11::3], fields[12::3], fields[13::3], strict=True)
    try:
        return [
            Section(rows, columns, _DTYPES[code % _ON_HOST if code < 2 * _ON_HOST else code], on_host=code >= _ON_HOST)
            for rows, columns, code in listed
            if code >= 0
        ]
    except IndexError:
        raise _error(expected, f"a known dtype, received header {fields}") from None


def _check_sizes(sections: list[Section], needed: int, nbytes: int, expected: Stamp) -> None:
    if any(s.rows < 0 or s.columns < 0 for s in sections) or needed > nbytes:
        raise _error(expected, f"at most {nbytes} bytes, received sections {sections}")


def _compare(fields: list[int], expected: Stamp) -> None:
    if fields[0] != MAGIC:
        raise _error(expected, f"a header, received other bytes (first word {fields[0]:#x})")
    if not (0 <= fields[4] < len(_OPS) and 0 <= fields[5] < len(_PHASES)):
        raise _error(expected, f"a known action, received header {fields}")
    action = Action(_OPS[fields[4]], fields[6], _PHASES[fields[5]], fields[7])
    got = Stamp(action=action, sender=fields[8], step=fields[1], attempt=fields[2], map_version=fields[3])
    if (got.step, got.attempt, got.map_version) != (expected.step, expected.attempt, expected.map_version):
        raise StaleMessage(_sentence(expected, f"{expected}, received {got}"))
    if got != expected:
        raise _error(expected, f"{expected}, received {got}")


def _error(expected: Stamp, difference: str) -> ProtocolError:
    return ProtocolError(_sentence(expected, difference))


def _sentence(expected: Stamp, difference: str) -> str:
    action = expected.action
    place = f"{action} (layer {action.layer}, micro-batch {action.micro_batch})"
    return f"message {place} from rank {expected.sender}: expected {difference}"
