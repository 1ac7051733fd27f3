"""How fast messages between ranks are: a few sizes and counts, between pairs that don't wait for one another.

Each rank exchanges messages with one rank of its node, then with one of another node, all pairs at the same time: that
is what a step does, and takes as long on many ranks as on two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_afd.cost.measured import Sample

SIZES = (2**12, 2**16, 2**20)
"""Bytes of a message."""
COUNTS = (1, 8)
"""Messages of a burst."""
ROUNDS = 5
"""Of each, after a first one; the fastest counts."""


class Mail(Protocol):
    """Messages to and from one peer, in order."""

    def post(self, peer: int, nbytes: int) -> Any:
        """Offer a buffer for the next message; its `wait()` blocks until that is there."""

    def send(self, peer: int, message: Tensor) -> Any:
        """Send without waiting; `wait()` of what it returns blocks until the buffer is free."""


class GroupMail:
    """Messages over torch.distributed's default group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def post(self, peer: int, nbytes: int) -> Any:
        return dist.irecv(torch.empty(nbytes, dtype=torch.uint8, device=self._device), src=peer)

    def send(self, peer: int, message: Tensor) -> Any:
        return dist.isend(message, dst=peer)


def near_peer(nodes: Sequence[int], rank: int) -> int | None:
    """The neighbour on this rank's node that it is paired with; None for the last one of an odd number."""
    mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    return _partner(mine, mine.index(rank))


def far_peer(nodes: Sequence[int], rank: int) -> int | None:
    """The rank with the same place on the node that this one's is paired with, if there is one."""
    order = list(dict.fromkeys(nodes))
    other = _partner(order, order.index(nodes[rank]))
    mine = [r for r, node in enumerate(nodes) if node == nodes[rank]]
    theirs = [r for r, node in enumerate(nodes) if node == other]
    place = mine.index(rank)
    return theirs[place] if place < len(theirs) else None


def measure_pair(mail: Mail, rank: int, peer: int, device: torch.device, time: Callable[[], float]) -> list[Sample]:
    """Both ranks call it: bursts to the peer and back; seconds of one way.

    `time` is called when the device has nothing left to do.
    """
    found = []
    for nbytes in SIZES:
        message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for count in COUNTS:
            seconds = [_there_and_back(mail, rank < peer, peer, (message, count), time) for _ in range(ROUNDS + 1)]
            found.append(Sample(messages=count, nbytes=nbytes, seconds=min(seconds[1:]) / 2))
    return found


def _there_and_back(mail: Mail, begins: bool, peer: int, burst: tuple[Tensor, int], time: Callable[[], float]) -> float:
    """Receives are posted before anything is sent, as in a step; but on GPUs, where what two ranks send each other
    stands in one queue, in the order in which it travels.
    """
    message, count = burst

    def post() -> list[Any]:
        return [mail.post(peer, message.numel()) for _ in range(count)]

    def send() -> list[Any]:
        return [mail.send(peer, message) for _ in range(count)]

    incoming = post() if message.device.type == "cpu" else []
    start = time()
    sent = send() if begins else []
    incoming = incoming or post()
    _wait(incoming)
    _wait(sent or send())
    return time() - start


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _partner(items: Sequence[int], place: int) -> int | None:
    other = place ^ 1
    return items[other] if other < len(items) else None
