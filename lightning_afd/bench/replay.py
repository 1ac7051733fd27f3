"""Computation without communication: a rank repeats a step alone, against the messages that it got when it ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_afd.transport.announced import RowsTransport
from lightning_afd.transport.base import Channel, Incoming, Transport

_Message = tuple[Literal["message", "announcement", "rows"], Channel, int, int]
"""What it is, channel, sender and tag."""


class Tap:
    """A rank's transport, which can keep what arrives, and give that back without any network."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: dict[_Message, Tensor] = {}
        self._keeping = self._replaying = False

    def live(self) -> None:
        """From now on all is as without a tap."""
        self._keeping = self._replaying = False

    def keep(self) -> None:
        """Messages of the next step are kept, those of earlier ones forgotten."""
        self._kept.clear()
        self._keeping, self._replaying = True, False

    def replay(self) -> None:
        """What was kept has arrived already, and sends go nowhere."""
        self._keeping, self._replaying = False, True

    def post(self, channel: Channel, peer: int, tag: int, nbytes: int) -> Incoming:
        key: _Message = ("message", channel, peer, tag)
        return self._arrived(key) or self._tapped(key, self._transport.post(channel, peer, tag, nbytes))

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        if not self._replaying:
            self._transport.send(channel, peer, tag, message)

    def release(self, micro_batch: int | None = None, *, but: str = "") -> None:
        if not self._replaying:
            self._transport.release(micro_batch, but=but)

    def _arrived(self, key: _Message) -> Incoming | None:
        """What was kept, where that is given back."""
        return _Arrived(self._kept[key]) if self._replaying else None

    def _tapped(self, key: _Message, incoming: Incoming) -> Incoming:
        """A receive, whose message is kept where that is asked for."""
        return _Kept(incoming, self._kept, key) if self._keeping else incoming


class RowsTap(Tap):
    """The same of a transport whose messages are announced (RowsTransport)."""

    announces = True

    def __init__(self, transport: RowsTransport) -> None:
        super().__init__(transport)
        self._rows = transport

    def announce(self, channel: Channel, peer: int, tag: int, announcement: Tensor) -> None:
        if not self._replaying:
            self._rows.announce(channel, peer, tag, announcement)

    def expect(self, channel: Channel, peer: int, tag: int) -> Incoming:
        key: _Message = ("announcement", channel, peer, tag)
        return self._arrived(key) or self._tapped(key, self._rows.expect(channel, peer, tag))

    def send_rows(self, channel: Channel, tag: int, rows: Sequence[tuple[int, Tensor]]) -> None:
        if not self._replaying:
            self._rows.send_rows(channel, tag, rows)

    def post_rows(self, channel: Channel, tag: int, sizes: Sequence[tuple[int, int]]) -> list[Incoming]:
        keys: list[_Message] = [("rows", channel, peer, tag) for peer, _ in sizes]
        if self._replaying:
            return [_Arrived(self._kept[key]) for key in keys]
        posted = self._rows.post_rows(channel, tag, sizes)
        return [self._tapped(key, incoming) for key, incoming in zip(keys, posted, strict=True)]


def tap_of(transport: Transport) -> Tap:
    """The tap that goes with a transport: it announces messages where that does."""
    return RowsTap(transport) if getattr(transport, "announces", False) else Tap(transport)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Arrived:
    message: Tensor

    def wait(self) -> Tensor:
        return self.message


@dataclass(frozen=True)
class _Kept:
    """A receive whose message is kept once it is there."""

    incoming: Incoming
    kept: dict[_Message, Tensor]
    key: _Message

    def wait(self) -> Tensor:
        message = self.incoming.wait()
        self.kept[self.key] = message.clone()
        return message
