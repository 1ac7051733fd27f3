"""All ranks of a job inside one thread, with messages as NCCL has them: announced, without tags, of exact sizes.

The k-th tensor that a rank sends to another one on a channel goes into the k-th buffer that is posted for it there,
whatever either is about; a size that differs is an error here, where NCCL would hang or mix bytes up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_afd.errors import ProtocolError
from lightning_afd.transport.base import Channel, Incoming, name_of
from lightning_afd.transport.local import LocalNetwork, LocalTransport

Route = tuple[Channel, int, int]
"""Channel, sender and receiver."""


class OrderedNetwork(LocalNetwork):
    """The ranks of one in-process job, and queues between them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queues: defaultdict[Route, list[tuple[str, Tensor]]] = defaultdict(list)
        """What has been sent in this run, with the name of its action."""
        self._posted: Counter[Route] = Counter()

    def transport(self, rank: int) -> OrderedTransport:
        return OrderedTransport(self, rank)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        self._queues.clear()
        self._posted.clear()
        results = super().run(functions)
        left = [
            queue[self._posted[route]][0] for route, queue in self._queues.items() if len(queue) > self._posted[route]
        ]
        if left:
            raise ProtocolError(f"rows that nobody received: {' '.join(left)}")
        return results

    def put(self, route: Route, name: str, rows: Tensor) -> None:
        """Send the next tensor of a queue."""
        self._queues[route].append((name, rows))
        self.count(route, rows.numel())

    def post(self, route: Route, name: str, nbytes: int) -> Callable[[], Tensor]:
        """Offer the next buffer of a queue; the returned function waits for what comes into it."""
        place = self._posted[route]
        self._posted[route] += 1
        return partial(self._taken, route, place, name, nbytes)

    def _taken(self, route: Route, place: int, name: str, nbytes: int) -> Tensor:
        queue, (_, sender, receiver) = self._queues[route], route
        self.wait_until(receiver, lambda: len(queue) > place, f"the rows of {name} from rank {sender}")
        sent, rows = queue[place]
        if rows.numel() != nbytes or sent != name:
            raise ProtocolError(
                f"rank {sender} sent the {rows.numel()} bytes of {sent} to rank {receiver}, which has a buffer of "
                f"{nbytes} for {name}: a transport without tags delivers in the order of posts"
            )
        return rows


class OrderedTransport(LocalTransport):
    """Transport whose messages have to be announced (RowsTransport), and Collectives, of one rank."""

    announces = True
    _network: OrderedNetwork

    def announce(self, channel: Channel, peer: int, tag: int, announcement: Tensor) -> None:
        super().send(channel, peer, tag, announcement)

    def expect(self, channel: Channel, peer: int, tag: int) -> Incoming:
        return super().post(channel, peer, tag, 2**31)

    def send_rows(self, channel: Channel, tag: int, rows: Sequence[tuple[int, Tensor]]) -> None:
        for peer, tensor in rows:
            self._network.put((channel, self._rank, peer), name_of(channel, tag), tensor.clone())

    def post_rows(self, channel: Channel, tag: int, sizes: Sequence[tuple[int, int]]) -> list[Incoming]:
        post, name = self._network.post, name_of(channel, tag)
        return [_Rows(post((channel, peer, self._rank), name, nbytes)) for peer, nbytes in sizes]

    def post(self, channel: Channel, peer: int, tag: int, nbytes: int) -> Incoming:
        """A buffer for messages with a header, which is found by its place in the queue all the same."""
        return self.post_rows(channel, tag, [(peer, nbytes)])[0]

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        self.send_rows(channel, tag, [(peer, message)])


class _Rows:
    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self.wait = wait
