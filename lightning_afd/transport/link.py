"""Messages of the schedule between ranks: stamped, checked, and received into buffers that were posted ahead.

The size of a message depends on the routing (that of a hop on the batch) and is not known when its receiver posts. So
the buffer has an agreed capacity: the largest one that the sender asked for in earlier steps. A message that does not
fit (all of the first step) is announced by one without rows that says how much is needed.

Such a receiver has to tell messages apart and to accept shorter ones: where the transport can do neither, messages are
announced (transport/announced.py).

What a rank of a collocated layout sends to itself is handed over as it is: no network, no capacity, no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_afd.errors import ProtocolError
from lightning_afd.schedule.actions import Action, Op
from lightning_afd.transport.base import Channel, Incoming, Transport, tag_of
from lightning_afd.transport.wire import (
    HEADER_BYTES,
    Section,
    Stamp,
    allocate,
    expect,
    expect_dispatch,
    needed_bytes,
    read,
    too_small,
)

_UNTOLD: Mapping[Op, str] = {"D": "DXY", "C": "C", "X": "DCHLX", "Y": "DCHLY"}
"""Ops whose sends may be on their way when an op has arrived. A dispatch tells nothing about dispatches of a rank with
both roles, nor a combine about combines, nor what comes from A ranks about what F ranks of a node do. Who sends in an
exchange has taken all that was sent in those before it, but maybe not in this one."""

Parcel = tuple[int, Any, int]
"""Receiver, message of `Link.allocate`, and the size that others of its channel may need."""


class Link:
    """One rank's end of all messages; counts what it sends."""

    def __init__(self, transport: Transport, rank: int, device: torch.device, map_version: int = 0) -> None:
        self.rank = rank
        self.payload_bytes = 0
        self.sent: dict[tuple[Channel, int], tuple[int, int]] = {}
        """Messages and bytes, headers included, of the last step by channel and receiver."""
        self._transport = transport
        self.device = device
        self.map_version = map_version
        self._step = 0
        self._incoming = _Capacities()
        self._outgoing = _Capacities()
        self._own: dict[Action, list[Tensor]] = {}

    def begin(self, step: int) -> None:
        """Start step number `step`: what was asked for until now becomes the capacity."""
        self._step = step
        self.sent = {}
        self._incoming.adopt()
        self._outgoing.adopt()
        self._own.clear()

    def post(self, action: Action, peer: int) -> Posted:
        """Offer a buffer of the agreed capacity for a message of `peer`; one of this rank itself needs none."""
        expected = self.stamp(action, peer)
        if peer == self.rank:
            return Posted(expected, partial(self._handed_over, action))
        capacity = self._incoming.of(channel_of(action), peer)
        return Posted(expected, partial(self._arrived, self._post(action, peer, capacity), expected))

    def allocate(self, action: Action, sections: Sequence[Section]) -> tuple[Tensor, list[Tensor]]:
        """A message to be filled in through the returned views."""
        return allocate(self.stamp(action, self.rank), sections, self.device)

    def send(self, action: Action, peer: int, message: Any, most: int) -> None:
        """Send a message; `most` is the size that others of its channel may need."""
        self.send_all(action, [(peer, message, most)])

    def send_all(self, action: Action, parcels: Sequence[Parcel]) -> None:
        """Send the messages of one action."""
        for peer, message, most in parcels:
            self._send_one(action, peer, message, most)

    def open(self, posted: Sequence[Posted]) -> None:
        """The messages of one action are about to be waited for; here their buffers have been offered before."""

    def _send_one(self, action: Action, peer: int, message: Tensor, most: int) -> None:
        if peer == self.rank:
            self.hand_over(action, read(message, self.stamp(action, peer)))
            return
        part = int(message.numel() > self._outgoing.of(channel_of(action), peer))
        if part:
            need = max(most, message.numel())
            self._outgoing.ask(channel_of(action), peer, need)
            self._send(action, peer, 0, too_small(self.stamp(action, self.rank), need, self.device))
        self._send(action, peer, part, message)

    def hand_over(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Send the sections of a message to this rank itself; whoever receives them must not write into them."""
        self._own[action] = list(tensors)

    def release(self, arrived: Action | None = None) -> None:
        """Finish the sends of a micro-batch that have arrived, as `arrived` has from all who send it, or all (None).

        What arrives may tell nothing about some others of this rank, which may be on their way: see `_UNTOLD`.
        """
        if arrived is None:
            self._transport.release()
        else:
            self._transport.release(arrived.micro_batch, but=_UNTOLD.get(arrived.op, ""))

    def stamp(self, action: Action, sender: int) -> Stamp:
        return Stamp(action=action, sender=sender, step=self._step, map_version=self.map_version)

    def _arrived(self, incoming: Incoming, expected: Stamp) -> list[Tensor]:
        """The sections of a message, which may come into a larger buffer than the one that was offered."""
        message = arrived(incoming, expected)
        need = needed_bytes(message, expected)
        if need:
            action, peer = expected.action, expected.sender
            self._incoming.ask(channel_of(action), peer, need)
            message = arrived(self._post(action, peer, need, part=1), expected)
        return read(message, expected)

    def _handed_over(self, action: Action) -> list[Tensor]:
        if action not in self._own:
            raise ProtocolError(f"rank {self.rank} waits for its own {action}, which it has not sent")
        return self._own.pop(action)

    def _post(self, action: Action, peer: int, nbytes: int, part: int = 0) -> Incoming:
        return self._transport.post(channel_of(action), peer, tag_of(action.layer, action.micro_batch, part), nbytes)

    def _send(self, action: Action, peer: int, part: int, message: Tensor) -> None:
        self._count(channel_of(action), peer, message.numel(), message.numel() - HEADER_BYTES)
        self._transport.send(channel_of(action), peer, tag_of(action.layer, action.micro_batch, part), message)

    def _count(self, channel: Channel, peer: int, size: int, payload: int) -> None:
        """A message of so many bytes leaves, of which `payload` are rows."""
        self.payload_bytes += payload
        messages, nbytes = self.sent.get((channel, peer), (0, 0))
        self.sent[channel, peer] = messages + 1, nbytes + size


class _Capacities:
    """Sizes of the buffers per channel and peer: fixed within a step, grown between steps on both ends alike."""

    def __init__(self) -> None:
        self._now: dict[tuple[Channel, int], int] = {}
        self._asked: dict[tuple[Channel, int], int] = {}

    def of(self, channel: Channel, peer: int) -> int:
        return self._now.get((channel, peer), HEADER_BYTES)

    def ask(self, channel: Channel, peer: int, need: int) -> None:
        self._asked[channel, peer] = max(self._asked.get((channel, peer), 0), need)

    def adopt(self) -> None:
        for key, need in self._asked.items():
            self._now[key] = max(self._now.get(key, HEADER_BYTES), need)
        self._asked.clear()


class Posted:
    """A message that this rank will receive, whose rows only the sender knows for sure."""

    def __init__(self, expected: Stamp, sections: Callable[[], list[Tensor]]) -> None:
        """`sections` waits for the message."""
        self.expected, self._sections = expected, sections

    def wait(self) -> list[Tensor]:
        """The message's tensors, after its header has been checked."""
        views, action = self._sections(), self.expected.action
        if action.op in "DX" and action.phase == "f":
            expect_dispatch(views, self.expected)
        return views

    def wait_for(self, sections: Sequence[Section]) -> list[Tensor]:
        """The tensors of a message whose rows are known by now, after they have been compared, too."""
        views = self.wait()
        expect(views, sections, self.expected)
        return views


def arrived(incoming: Incoming, expected: Stamp) -> Tensor:
    """The bytes of a message; an error of the connection gets a note that says whose message is missing."""
    try:
        return incoming.wait()
    except RuntimeError as error:
        error.add_note(f"while waiting for {expected.action} from rank {expected.sender}")
        raise


def channel_of(action: Action) -> Channel:
    """The channel of a communication action."""
    return f"{action.op}{action.phase}"  # type: ignore[return-value]
