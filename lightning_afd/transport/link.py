"""Messages of the schedule between ranks: stamped, checked, and received into buffers that were posted ahead.

The size of a dispatch depends on the routing (that of a hop on the batch), so its receiver posts a buffer of an agreed
capacity: the largest one that the sender asked for in earlier steps. A dispatch that does not fit (all of the first
step) is announced by a message without rows that says how much is needed. All other messages answer one with known
rows, so their sizes are exact.

What a rank of a collocated layout sends to itself is handed over as it is: no network, no capacity, no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_afd.errors import ProtocolError
from lightning_afd.schedule.actions import Action
from lightning_afd.transport.base import Channel, Incoming, Transport, tag_of
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


class Link:
    """One rank's end of all messages; counts the payload that it sends."""

    def __init__(self, transport: Transport, rank: int, device: torch.device, map_version: int = 0) -> None:
        self.rank = rank
        self.payload_bytes = 0
        self._transport = transport
        self.device = device
        self._map_version = map_version
        self._step = 0
        self._incoming = _Capacities()
        self._outgoing = _Capacities()
        self._own: dict[Action, list[Tensor]] = {}

    def begin(self, step: int) -> None:
        """Start step number `step`: what was asked for until now becomes the capacity."""
        self._step = step
        self._incoming.adopt()
        self._outgoing.adopt()
        self._own.clear()

    def post(self, action: Action, peer: int, sections: Sequence[Section]) -> Arriving:
        """Offer a buffer for the answer `action` of `peer`, whose sections are known."""
        if peer == self.rank:
            return _HandedOver(self, action, self._own, tuple(sections))
        incoming = self._post(action, peer, message_bytes(sections))
        return Posted(self, action, peer, incoming, tuple(sections))

    def post_dispatch(self, action: Action, peer: int) -> Arriving:
        """Offer a buffer of the agreed capacity for a dispatch of `peer`."""
        if peer == self.rank:
            return _HandedOver(self, action, self._own, None)
        capacity = self._incoming.of(channel_of(action), peer)
        return PostedDispatch(self, action, peer, self._post(action, peer, capacity))

    def allocate(self, action: Action, sections: Sequence[Section]) -> tuple[Tensor, list[Tensor]]:
        """A message to be filled in through the returned views."""
        return allocate(self.stamp(action, self.rank), sections, self.device)

    def send(self, action: Action, peer: int, message: Tensor) -> None:
        """Send an answer."""
        if peer == self.rank:
            self.hand_over(action, read(message, self.stamp(action, peer)))
        else:
            self._send(action, peer, 0, message)

    def hand_over(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Send the sections of a message to this rank itself; whoever receives them must not write into them."""
        self._own[action] = list(tensors)

    def send_dispatch(self, action: Action, peer: int, message: Tensor, most: int) -> None:
        """Send a dispatch; `most` is the size that this micro-batch can need at any layer."""
        if peer == self.rank:
            self.send(action, peer, message)
            return
        part = int(message.numel() > self._outgoing.of(channel_of(action), peer))
        if part:
            need = max(most, message.numel())
            self._outgoing.ask(channel_of(action), peer, need)
            self._send(action, peer, 0, too_small(self.stamp(action, self.rank), need, self.device))
        self._send(action, peer, part, message)

    def release(self, arrived: Action | None = None) -> None:
        """Finish the sends of a micro-batch that have arrived, as `arrived` has from all who send it, or all (None).

        A dispatch tells nothing about dispatches of this rank, nor a combine about combines: where it has both roles,
        they may be on their way.
        """
        if arrived is None:
            self._transport.release()
        else:
            self._transport.release(arrived.micro_batch, but=arrived.op if arrived.op in "DC" else "")

    def stamp(self, action: Action, sender: int) -> Stamp:
        return Stamp(action=action, sender=sender, step=self._step, map_version=self._map_version)

    def grown(self, action: Action, peer: int, need: int) -> Incoming:
        """Offer the larger buffer that a too small one was answered with."""
        self._incoming.ask(channel_of(action), peer, need)
        return self._post(action, peer, need, part=1)

    def _post(self, action: Action, peer: int, nbytes: int, part: int = 0) -> Incoming:
        return self._transport.post(channel_of(action), peer, tag_of(action.layer, action.micro_batch, part), nbytes)

    def _send(self, action: Action, peer: int, part: int, message: Tensor) -> None:
        self.payload_bytes += message.numel() - HEADER_BYTES
        self._transport.send(channel_of(action), peer, tag_of(action.layer, action.micro_batch, part), message)


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


class Arriving(Protocol):
    """A message that this rank will receive."""

    def wait(self) -> list[Tensor]:
        """The message's tensors, after they have been checked."""


class _HandedOver:
    """What this rank sends to itself, before it waits for it; the sections of a dispatch are not known ahead (None)."""

    def __init__(
        self, link: Link, action: Action, own: dict[Action, list[Tensor]], sections: tuple[Section, ...] | None
    ) -> None:
        self._expected = link.stamp(action, link.rank)
        self._own = own
        self._sections = sections

    def wait(self) -> list[Tensor]:
        action = self._expected.action
        if action not in self._own:
            raise ProtocolError(f"rank {self._expected.sender} waits for its own {action}, which it has not sent")
        views = self._own.pop(action)
        if self._sections is not None:
            expect(views, self._sections, self._expected)
        elif action.op == "D":
            expect_dispatch(views, self._expected)
        return views


class Posted:
    """A posted receive of a message with known sections."""

    def __init__(
        self, link: Link, action: Action, peer: int, incoming: Incoming, sections: tuple[Section, ...]
    ) -> None:
        self._expected = link.stamp(action, peer)
        self._incoming = incoming
        self._sections = sections

    def wait(self) -> list[Tensor]:
        """The message's tensors, after its header has been checked."""
        views = read(arrived(self._incoming, self._expected), self._expected)
        expect(views, self._sections, self._expected)
        return views


class PostedDispatch:
    """A posted receive of a dispatch, whose rows only the sender knows."""

    def __init__(self, link: Link, action: Action, peer: int, incoming: Incoming) -> None:
        self._link, self._action, self._peer, self._incoming = link, action, peer, incoming

    def wait(self) -> list[Tensor]:
        """The dispatch's tensors, after its header has been checked."""
        expected = self._link.stamp(self._action, self._peer)
        message = arrived(self._incoming, expected)
        need = needed_bytes(message, expected)
        if need:
            message = arrived(self._link.grown(self._action, self._peer, need), expected)
        views = read(message, expected)
        if self._action.op == "D":
            expect_dispatch(views, expected)
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
