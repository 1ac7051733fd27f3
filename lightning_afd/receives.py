"""Receives of one rank, posted before they are waited for, so that messages travel while it computes.

Posts follow the rank's program. So they have the order of the sends on each channel (check_channels), as transports
without tags need. Buffers have the agreed capacity of their channel: nobody knows the rows of a later message. What a
rank with both roles sends to itself needs none, and is taken here all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_afd.peers import Peers
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.transport.link import Link, Posted

AHEAD = 8
"""How many computations that wait for messages look ahead: their buffers are offered while an earlier one runs."""


class Expected:
    """The receives of a rank's program, in its order; the same for every step that runs it."""

    def __init__(self, peers: Peers, program: Sequence[Step]) -> None:
        self.blocks = _blocks(peers, program)
        """Those together that no computation divides."""
        self.block_of = {action: number for number, block in enumerate(self.blocks) for action in block}


class Receives:
    """The messages that come to one rank in one step."""

    def __init__(self, link: Link, peers: Peers, expected: Expected) -> None:
        self._link = link
        self._peers = peers
        self._blocks, self._block_of = expected.blocks, expected.block_of
        self._posted: dict[Action, list[Posted]] = {}
        self._next = 0
        self._post_until(AHEAD)

    def take(self, action: Action) -> list[Posted]:
        """What has been posted for an action, by sender (Peers.senders)."""
        self._post_until(self._block_of[action] + AHEAD)
        posted = self._posted.pop(action)
        self._link.open(posted)
        return posted

    def _post_until(self, end: int) -> None:
        while self._next <= min(end, len(self._blocks) - 1):
            for action in self._blocks[self._next]:
                self._posted[action] = [self._link.post(action, peer) for peer in self._peers.senders(action)]
            self._next += 1


def _blocks(peers: Peers, program: Sequence[Step]) -> list[list[Action]]:
    blocks: list[list[Action]] = []
    divided = True
    for step in program:
        if peers.shape.receives(step.worker, step.action):
            if divided:
                blocks.append([])
            blocks[-1].append(step.action)
            divided = False
        elif not step.action.is_transfer and step.action.op != "S":
            divided = True
    return blocks
