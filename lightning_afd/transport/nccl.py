"""torch.distributed on GPUs: rows travel over NCCL, their announcements from host to host over gloo.

What NCCL asks for, and who sees to it (more in docs/gpu.md):
- messages of a communicator have no tags and exact sizes: AnnouncedLink, which posts them in the order of the channel;
- a send or receive is a kernel that holds a part of the GPU until its counterpart is there: both ends of the messages
  of one action are one batch, a receive is posted once its sender is there, and CHANNEL_CTAS caps what a kernel takes;
- what one communicator does on a rank, it does one after the other: messages that could wait for one another in a
  circle are in different ones (transport/lanes.py);
- `wait` makes the current stream wait, not the host: buffers are kept until the work is done on the device.

Nothing here asks what the backend is: over gloo the same code runs on CPUs, where it is tested.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_afd.transport.announced import ANNOUNCEMENT_BYTES
from lightning_afd.transport.base import CHANNELS, GROUP_CHANNELS, NODE_CHANNELS, Channel, Incoming
from lightning_afd.transport.p2p import P2PTransport, Posted, ProcessGroups

_NUMBERS = {channel: number for number, channel in enumerate(CHANNELS + GROUP_CHANNELS + NODE_CHANNELS)}
_IN_STOCK = 2
"""Buffers of a size that are there before they are needed, the one that is being taken included."""


class NcclTransport(P2PTransport):
    """Transport whose messages are announced (RowsTransport), and Collectives."""

    announces = True

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        super().__init__(groups, device)
        self._stock = Stock(device)
        self._leaving: deque[tuple[list[Any], list[Tensor]]] = deque()
        """Rows on their way, with the works that send them."""

    def announce(self, channel: Channel, peer: int, tag: int, announcement: Tensor) -> None:
        self._send_in(self._groups.announcements, channel, peer, (tag, tag_of_all(channel, tag)), announcement)

    def expect(self, channel: Channel, peer: int, tag: int) -> Incoming:
        buffer = torch.empty(ANNOUNCEMENT_BYTES, dtype=torch.uint8)
        group = self._groups.announcements
        return self.track(Posted(dist.irecv(buffer, src=peer, group=group, tag=tag_of_all(channel, tag)), buffer))

    def send_rows(self, channel: Channel, tag: int, rows: Sequence[tuple[int, Tensor]]) -> None:
        self._forget(lambda works: all(work.is_completed() for work in works))
        lanes: defaultdict[Any, list[Any]] = defaultdict(list)
        for peer, tensor in rows:
            group = self._groups.between(channel, self._rank, peer)
            lanes[group].append(dist.P2POp(dist.isend, tensor, peer, group))
            self.sent_bytes += tensor.numel()
        for operations in lanes.values():
            self._leaving.append((dist.batch_isend_irecv(operations), [each.tensor for each in operations]))

    def post_rows(self, channel: Channel, tag: int, sizes: Sequence[tuple[int, int]]) -> list[Incoming]:
        buffers = [self._stock.take(nbytes) for _, nbytes in sizes]
        lanes: defaultdict[Any, list[int]] = defaultdict(list)
        for number, (peer, _) in enumerate(sizes):
            lanes[self._groups.between(channel, peer, self._rank)].append(number)
        found: dict[int, Incoming] = {}
        with self._stock.posting():
            for group, numbers in lanes.items():
                operations = [dist.P2POp(dist.irecv, buffers[each], sizes[each][0], group) for each in numbers]
                works = dist.batch_isend_irecv(operations)
                shared = works * len(numbers) if len(works) == 1 else works  # NCCL has one for the whole batch
                found |= {
                    each: self.track(Posted(work, buffers[each])) for each, work in zip(numbers, shared, strict=True)
                }
        return [found[number] for number in range(len(sizes))]

    def release(self, micro_batch: int | None = None, *, but: str = "") -> None:
        super().release(micro_batch, but=but)
        if micro_batch is None:
            for works, _ in self._leaving:
                for work in works:
                    work.wait()
            self._leaving.clear()

    def drop(self) -> None:
        super().drop()
        self._leaving.clear()

    def _forget(self, done: Callable[[list[Any]], bool]) -> None:
        """Let go of rows that have left the device, oldest first; that an answer is announced does not say so."""
        while self._leaving and done(self._leaving[0][0]):
            self._leaving.popleft()


def tag_of_all(channel: Channel, tag: int) -> int:
    """A number for a message that is unique within a step among those of all channels."""
    return tag * len(_NUMBERS) + _NUMBERS[channel]


class Stock:
    """Buffers for receives that must not wait for what the device has been given in the meantime.

    A buffer may lie where a tensor was that computations launched until now still read. So each is allocated a while
    before it is needed, with an event behind what had been launched by then, and the receive waits for that one. It
    comes from the pool of the current stream, which uses it: no record_stream, and it is free when nobody refers to it.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        """`api` is what makes streams and events, for tests."""
        self._device = device
        self._api = api
        self._stream = api.Stream(device) if device.type == "cuda" else None
        self._ready: defaultdict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)

    def take(self, nbytes: int) -> Tensor:
        """A buffer of exactly this size, for what is started in `posting`."""
        ready = self._ready[bucket_of(nbytes)]
        while len(ready) < _IN_STOCK:
            ready.append(self._allocate(bucket_of(nbytes)))
        buffer, event = ready.popleft()
        if self._stream is not None:
            self._stream.wait_event(event)
        return buffer[:nbytes]

    def posting(self) -> AbstractContextManager[Any]:
        """The stream behind which receives are to be started."""
        return nullcontext() if self._stream is None else self._api.stream(self._stream)

    def _allocate(self, nbytes: int) -> tuple[Tensor, Any]:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._stream is None:
            return buffer, None
        event = self._api.Event()
        event.record()
        return buffer, event


def bucket_of(nbytes: int) -> int:
    """The next of eight sizes per power of two, so that sizes repeat: the allocator finds blocks that fit."""
    unit = max(512, (1 << max(nbytes - 1, 1).bit_length()) // 16)
    return -(-nbytes // unit) * unit


def transport_of(groups: ProcessGroups, device: torch.device) -> P2PTransport:
    """The transport that goes with a device."""
    return NcclTransport(groups, device) if device.type == "cuda" else P2PTransport(groups, device)
