"""Computation without communication: a rank repeats a step alone, against the messages that it got when it ran."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_afd.transport.base import Channel, Incoming, Transport

_Message = tuple[Channel, int, int]
"""Channel, sender and tag."""


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
        if self._replaying:
            return _Arrived(self._kept[channel, peer, tag])
        incoming = self._transport.post(channel, peer, tag, nbytes)
        return _Kept(incoming, self._kept, (channel, peer, tag)) if self._keeping else incoming

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        if not self._replaying:
            self._transport.send(channel, peer, tag, message)

    def release(self, micro_batch: int | None = None, *, but: str = "") -> None:
        if not self._replaying:
            self._transport.release(micro_batch, but=but)


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
