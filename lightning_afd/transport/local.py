"""All ranks of a job inside one thread: an in-process transport for tests, simulation and debugging.

Each rank is a greenlet; a rank that waits for a message lets the others run. A round in which nobody could go on is a
deadlock and is reported at once with what each rank waits for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from lightning_afd.errors import ProtocolError
from lightning_afd.placement import Layout
from lightning_afd.transport.base import Channel, name_of


class LocalNetwork:
    """The ranks of one in-process job and the messages between them."""

    def __init__(self, layout: Layout, *, hold: Callable[[Channel, int], bool] | None = None) -> None:
        self.layout = layout
        self.sent_bytes: dict[tuple[Channel, int, int], int] = {}
        """Bytes per (channel, sender, receiver)."""
        self.objects: defaultdict[tuple[int, int], deque[object]] = defaultdict(deque)
        """Objects on their way, by (sender, receiver)."""
        self._mail: dict[tuple[Channel, int, int, int], Tensor] = {}
        self._hold = hold or (lambda channel, tag: False)
        self._gathered: dict[tuple[Sequence[int], int], dict[int, Any]] = {}
        self._hub: greenlet | None = None
        self._waiting: dict[int, str] = {}
        self._progress = 0

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank to the end; returns their results, raises the first exception."""
        self._hub = getcurrent()
        ranks = [greenlet(function) for function in functions]
        for rank in ranks:
            rank.gr_context = copy_context()
        results: list[Any] = [None] * len(ranks)
        while any(not rank.dead for rank in ranks):
            before = self._progress
            for index, rank in enumerate(ranks):
                if not rank.dead:
                    value = rank.switch()
                    if rank.dead:
                        results[index] = value
                        self._progress += 1
            if self._progress == before:
                waits = "; ".join(f"rank {rank} waits for {what}" for rank, what in sorted(self._waiting.items()))
                raise ProtocolError(f"deadlock: {waits}")
        if self._mail:
            left = (f"{name_of(c, tag)} from rank {s} to rank {r}" for c, s, r, tag in sorted(self._mail))
            raise ProtocolError(f"messages that nobody received: {'; '.join(left)}")
        return results

    def transport(self, rank: int) -> LocalTransport:
        """What a rank sends and receives by."""
        return LocalTransport(self, rank)

    def count(self, route: tuple[Channel, int, int], nbytes: int) -> None:
        """A message has been sent from the second to the third."""
        self._progress += 1
        self.sent_bytes[route] = self.sent_bytes.get(route, 0) + nbytes

    def deliver(self, channel: Channel, sender: int, receiver: int, tag: int, message: Tensor) -> None:
        key = (channel, sender, receiver, tag)
        if key in self._mail:
            raise ProtocolError(f"two messages {name_of(channel, tag)} from rank {sender} to rank {receiver}")
        self._mail[key] = message
        self.count((channel, sender, receiver), message.numel())

    def take(self, channel: Channel, sender: int, receiver: int, tag: int) -> Tensor:
        """Wait for a message; `hold(channel, tag)` may keep it back while another rank can do something."""
        key = (channel, sender, receiver, tag)
        self.wait_until(
            receiver,
            lambda: key in self._mail and not self._hold(channel, tag),
            f"{name_of(channel, tag)} from rank {sender}",
        )
        return self._mail.pop(key)

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()`."""
        assert self._hub is not None
        while not ready():
            self._waiting[rank] = what
            self._hub.switch()
        self._waiting.pop(rank, None)
        self._progress += 1

    def offer(self, rank: int, ranks: Sequence[int], serial: int, value: Any) -> dict[int, Any]:
        """Bring a value to a collective without waiting; returns where those of the others will be."""
        box: dict[int, Any] = self._gathered.setdefault((ranks, serial), {})
        box[rank] = value
        self._progress += 1
        return box

    def exchange(self, rank: int, ranks: Sequence[int], serial: int, value: Any) -> dict[int, Any]:
        """The value of every rank of `ranks` in their collective number `serial`."""
        box = self.offer(rank, ranks, serial, value)
        self.wait_until(rank, lambda: len(box) == len(ranks), f"collective {serial} of {ranks}")
        return box


class LocalTransport:
    """Transport and Collectives of one rank of a LocalNetwork."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank
        layout = network.layout
        self._world = range(layout.world)
        self._replicas = layout.copies_of(rank)
        self._serial = {self._world: 0, self._replicas: 0}
        self._started = 0

    def post(self, channel: Channel, peer: int, tag: int, nbytes: int) -> _LocalIncoming:
        return _LocalIncoming(self._network, (channel, peer, self._rank, tag), nbytes)

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        self._network.deliver(channel, self._rank, peer, tag, message.clone())

    def release(self, micro_batch: int | None = None, *, but: str = "") -> None:
        """Nothing to do: messages are copied."""

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        box = self._exchange(self._world, list(values))
        return [box[rank] for rank in sorted(box)]

    def broadcast_object(self, value: object, source: int) -> object:
        return self._exchange(self._world, value)[source]

    def gather_object(self, value: object) -> list[Any] | None:
        box = self._exchange(self._world, value)
        return None if self._rank else [box[rank] for rank in self._world]

    def send_object(self, value: object, receiver: int) -> None:
        self._network.objects[self._rank, receiver].append(value)

    def receive_object(self, sender: int) -> object:
        box = self._network.objects[sender, self._rank]
        self._network.wait_until(self._rank, lambda: bool(box), f"an object of rank {sender}")
        return box.popleft()

    def start_sum(self, tensor: Tensor) -> _Summed:
        box = self._exchange(self._world, tensor.clone())
        return _Summed(tensor.copy_(torch.stack([box[rank] for rank in self._world]).sum(0)))

    def sum_over_replicas(self, tensor: Tensor) -> None:
        box = self._exchange(self._replicas, tensor.clone())
        tensor.copy_(torch.stack([box[rank] for rank in self._replicas]).sum(0))

    def start_sum_over_replicas(self, tensor: Tensor) -> _LocalSum:
        self._started += 1
        box = self._network.offer(self._rank, self._replicas, -self._started, tensor.clone())
        what = f"sum {self._started} of {self._replicas}"
        return _LocalSum(tensor, box, self._replicas, lambda ready: self._network.wait_until(self._rank, ready, what))

    def copy_from_first_replica(self, tensor: Tensor) -> None:
        tensor.copy_(self._exchange(self._replicas, tensor.clone())[self._replicas[0]])

    def _exchange(self, ranks: Sequence[int], value: Any) -> dict[int, Any]:
        self._serial[ranks] += 1
        return self._network.exchange(self._rank, ranks, self._serial[ranks], value)


class _Summed:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class _LocalSum:
    def __init__(
        self,
        tensor: Tensor,
        box: dict[int, Any],
        ranks: Sequence[int],
        wait_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._tensor, self._box, self._ranks, self._wait_until = tensor, box, ranks, wait_until

    def is_done(self) -> bool:
        return len(self._box) == len(self._ranks)

    def wait(self) -> Tensor:
        self._wait_until(self.is_done)
        sizes = {value.numel() for value in self._box.values()}
        if len(sizes) > 1:
            raise ProtocolError(f"the ranks {self._ranks} sum tensors of different sizes: {sorted(sizes)}")
        return self._tensor.copy_(torch.stack([self._box[rank] for rank in self._ranks]).sum(0))


class _LocalIncoming:
    def __init__(self, network: LocalNetwork, key: tuple[Channel, int, int, int], nbytes: int) -> None:
        self._network, self._key, self._nbytes = network, key, nbytes

    def wait(self) -> Tensor:
        message = self._network.take(*self._key)
        if message.numel() > self._nbytes:
            channel, sender, receiver, tag = self._key
            raise ProtocolError(
                f"message {name_of(channel, tag)} from rank {sender} to rank {receiver} has {message.numel()} bytes, "
                f"the buffer {self._nbytes}"
            )
        return message
