"""Which messages of a channel share connections, or on GPUs a communicator, in which they stand in one queue per rank.

There a message that waits for its receiver holds up those behind it. So messages between different worker groups are in
different lanes: those of one lane have one order at both ends (schedule/check.py proves it), whoever waits for whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from math import lcm

from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.shape import Shape
from lightning_afd.transport.base import CHANNELS, GROUP_CHANNELS, NODE_CHANNELS, Channel

Lane = tuple[Channel, object]


class Lanes:
    """The lanes of a layout; with `queues` as GPUs need them, else one per channel and, where ranks exchange something,
    direction.
    """

    def __init__(self, layout: Layout, *, queues: bool) -> None:
        self._layout = layout
        self._by_worker = queues and not layout.collocated

    def of(self, channel: Channel, sender: int, receiver: int) -> Lane:
        """The lane of messages from one rank to another."""
        back = (self._layout.collocated or channel in NODE_CHANNELS) and sender > receiver
        if self._by_worker:
            return channel, (self._layout.worker_of(sender), self._layout.worker_of(receiver), back)
        return channel, back

    def all(self) -> dict[Lane, list[int]]:
        """Every lane with its ranks, in the same order on all ranks."""
        layout, everyone = self._layout, list(range(self._layout.world))
        if self._by_worker:
            return {
                (channel, (a, b, back)): list(dict.fromkeys([*layout.ranks_of(a), *layout.ranks_of(b)]))
                for channel, a, b in dict.fromkeys(_pairs(layout))
                for back in (False, True)[: 1 + (channel in NODE_CHANNELS)]
            }
        grouped = layout.attention_groups > 1 or layout.head == "ffn"
        names = CHANNELS + GROUP_CHANNELS if grouped else CHANNELS
        inside = NODE_CHANNELS if layout.spreads else ()
        backs = names if layout.collocated else inside
        return {(name, False): everyone for name in (*names, *inside)} | {(name, True): everyone for name in backs}

    def talks(self, lane: Lane) -> list[tuple[int, int]]:
        """Senders and receivers of a lane, where it is a queue."""
        ranks = self.all()[lane]
        pairs = permutations(ranks, 2)
        if not self._by_worker:
            return [(sender, receiver) for sender, receiver in pairs if (sender > receiver) == lane[1]]
        return [pair for pair in pairs if self.of(lane[0], *pair) == lane]


def _pairs(layout: Layout) -> Iterator[tuple[Channel, Worker, Worker]]:
    """Who sends to whom on which channel, whatever the number of layers."""
    for layers in range(1, 2 * lcm(layout.attention_groups, layout.ffn_groups) + 1):
        shape = Shape(
            layers=layers,
            groups=layout.groups,
            micro_batches=1,
            router_logits=True,
            head=layout.head,
            spreads=layout.spreads,
        )
        for action in shape.actions():
            if action.is_transfer:
                yield f"{action.op}{action.phase}", *shape.endpoints(action)  # type: ignore[misc]
