"""Messages of the schedule over a transport that knows neither tags nor sizes, as NCCL: each is announced on the host.

An announcement is the message's header (transport/wire.py), with what the receiver needs on its host anyway. It travels
from host to host, is posted ahead and finds its receiver by its tag. The rows follow on the device, in the order of the
channel and without a header: the receiver offers buffers of exactly their size once it has read the announcements, all
buffers of an action at once. So nobody waits for a device to read a header, no first step has other messages than later
ones, and a posted receive, which occupies a part of the device, is one whose sender is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_afd.errors import ProtocolError
from lightning_afd.schedule.actions import Action
from lightning_afd.transport.base import Channel, Incoming, Transport, tag_of
from lightning_afd.transport.link import Link, Parcel, Posted, arrived, channel_of
from lightning_afd.transport.wire import Section, Stamp, announce, read_announcement, views

ANNOUNCEMENT_BYTES = 2**14
"""Buffer of an announcement; what is announced may be as large as it likes."""


class RowsTransport(Transport, Protocol):
    """A transport whose messages have to be announced; rows between two ranks keep their order on each channel."""

    def announce(self, channel: Channel, peer: int, tag: int, announcement: Tensor) -> None:
        """Send a host tensor of at most ANNOUNCEMENT_BYTES without waiting; kept alive until `release`."""

    def expect(self, channel: Channel, peer: int, tag: int) -> Incoming:
        """Offer a host buffer for an announcement of `peer`."""

    def send_rows(self, channel: Channel, tag: int, rows: Sequence[tuple[int, Tensor]]) -> None:
        """Send a tensor to each peer, together; they are kept alive until `release`. `tag` is for `release` only."""

    def post_rows(self, channel: Channel, tag: int, sizes: Sequence[tuple[int, int]]) -> list[Incoming]:
        """Offer a buffer of exactly so many bytes to each peer, together; `tag` is for errors only."""


@dataclass(frozen=True, eq=False)
class Announced:
    """A message before it is sent."""

    announcement: Tensor
    rows: Tensor
    views: list[Tensor]
    """All of its sections."""

    def numel(self) -> int:
        """Bytes of both."""
        return self.announcement.numel() + self.rows.numel()


class AnnouncedLink(Link):
    """A rank's end of all messages where they are announced."""

    def __init__(self, transport: RowsTransport, rank: int, device: torch.device, map_version: int = 0) -> None:
        super().__init__(transport, rank, device, map_version)
        self._rows = transport

    def post(self, action: Action, peer: int) -> Posted:
        if peer == self.rank:
            return super().post(action, peer)
        incoming = self._rows.expect(channel_of(action), peer, tag_of(action.layer, action.micro_batch))
        return _Expected(self, self.stamp(action, peer), incoming)

    def open(self, posted: Sequence[Posted]) -> None:
        """Read the announcements of one action's messages, and offer buffers for their rows, all together."""
        messages = [message for message in posted if isinstance(message, _Expected) and message.read()]
        if not messages:
            return
        action = messages[0].expected.action
        sizes = [(message.expected.sender, message.nbytes) for message in messages]
        tag = tag_of(action.layer, action.micro_batch)
        rows = self._rows.post_rows(channel_of(action), tag, sizes)
        for message, incoming in zip(messages, rows, strict=True):
            message.rows = incoming

    def allocate(self, action: Action, sections: Sequence[Section]) -> tuple[Announced, list[Tensor]]:
        announcement, carried = announce(self.stamp(action, self.rank), sections)
        if announcement.numel() > ANNOUNCEMENT_BYTES:
            raise ProtocolError(
                f"message {action} has {announcement.numel()} bytes for the host of its receiver, whose buffer has "
                f"{ANNOUNCEMENT_BYTES}"
            )
        travelling = [section for section in sections if not section.on_host]
        rows = torch.empty(sum(section.nbytes for section in travelling), dtype=torch.uint8, device=self.device)
        found = _merged(sections, carried, views(rows, travelling))
        return Announced(announcement, rows, found), found

    def send_all(self, action: Action, parcels: Sequence[Parcel]) -> None:
        channel, tag = channel_of(action), tag_of(action.layer, action.micro_batch)
        others = []
        for peer, message, _ in parcels:
            assert isinstance(message, Announced)
            if peer == self.rank:
                self.hand_over(action, message.views)
                continue
            self._rows.announce(channel, peer, tag, message.announcement)
            self._count(channel, peer, message.numel(), message.rows.numel())
            others += [(peer, message.rows)] if message.rows.numel() else []
        if others:
            self._rows.send_rows(channel, tag, others)


class _Expected(Posted):
    """A message whose announcement has been asked for."""

    def __init__(self, link: AnnouncedLink, expected: Stamp, announcement: Incoming) -> None:
        super().__init__(expected, self._take)
        self.rows: Incoming | None = None
        self._link = link
        self._announcement = announcement
        self._listed: list[Section] | None = None
        self._carried: list[Tensor] = []

    def read(self) -> bool:
        """Wait for the announcement, on the host; whether rows follow that no buffer has been offered for."""
        if self._listed is None:
            message = arrived(self._announcement, self.expected)
            self._listed, self._carried = read_announcement(message, self.expected)
        return self.nbytes > 0 and self.rows is None

    @property
    def nbytes(self) -> int:
        """Size of the rows."""
        return sum(section.nbytes for section in self._travelling)

    @property
    def _travelling(self) -> list[Section]:
        return [section for section in self._listed or () if not section.on_host]

    def _take(self) -> list[Tensor]:
        self._link.open([self])
        rows = torch.empty(0, dtype=torch.uint8, device=self._link.device)
        if self.rows is not None:
            rows = arrived(self.rows, self.expected)
        assert self._listed is not None
        return _merged(self._listed, self._carried, views(rows, self._travelling))


def _merged(sections: Sequence[Section], carried: Sequence[Tensor], travelled: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of all sections, in their order."""
    by_place = {True: iter(carried), False: iter(travelled)}
    return [next(by_place[section.on_host]) for section in sections]


def link_of(transport: Transport, rank: int, device: torch.device) -> Link:
    """The end of messages that goes with a transport."""
    announces = getattr(transport, "announces", False)
    return AnnouncedLink(transport, rank, device) if announces else Link(transport, rank, device)  # type: ignore[arg-type]
