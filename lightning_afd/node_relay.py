"""What an F rank does for the F ranks of its group on its node, where one copy of a token comes for all of them.

To them, itself included, it is what an A rank is elsewhere: it sends each the rows that have experts there, and makes
of what they return the one row for which its own A ranks wait, sums of 16-bit rows in float32. A ranks know nodes as
they know F ranks elsewhere, and the expert ids that they send count the experts of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_afd.asked import Asked, Rows
from lightning_afd.ffn_rank import FFNRank
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.routing import NodeRouter
from lightning_afd.model.shared import WithShared
from lightning_afd.peers import Peers
from lightning_afd.receives import Receives
from lightning_afd.runtime import Handler, Handlers
from lightning_afd.schedule.actions import Action
from lightning_afd.sent import Sent, nothing_sent, send_copies, send_gradients, sent_by
from lightning_afd.tail_rank import TailRank
from lightning_afd.transport.link import Link


@dataclass(eq=False)
class _Relayed:
    """Rows of one (layer, micro-batch) from the A ranks of this relay."""

    asked: Asked
    rows: Rows | None
    """Until they have been sent on."""
    sent: Sent | None = None
    dY_TH: Tensor | None = None
    out: list[list[Tensor]] = field(default_factory=list)
    """Answers per A rank, until they are sent."""


class NodeRelay:
    """State of one F rank as a relay during a step."""

    def __init__(self, link: Link, routers: Mapping[int, NodeRouter], peers: Peers) -> None:
        """`routers` have the experts of the node, by layer."""
        self._link = link
        self._routers = routers
        self._peers = peers
        self._training = False
        self._receives: Receives
        self._relayed: dict[tuple[int, int], _Relayed] = {}

    def begin(self, receives: Receives, *, training: bool) -> None:
        """Start a step."""
        self._receives, self._training = receives, training

    def end(self) -> None:
        """Drop whatever is left, after the last action or an error."""
        self._relayed.clear()

    def take(self, action: Action) -> None:
        """Take what A ranks dispatch (D)."""
        if action.phase == "f":
            self._relayed[action.layer, action.micro_batch] = _Relayed(*Asked.take(self._receives.take(action)))
        else:
            item = self._item(action)
            item.dY_TH = item.asked.take_gradients(self._receives.take(action))
        self._link.release(action)

    def spread(self, action: Action) -> None:
        """Send it on inside the node (X)."""
        item, ranks = self._item(action), self._peers.siblings
        if action.phase == "b":
            assert item.sent is not None
            send_gradients(self._link, action, ranks, item.sent, item.dY_TH)
            item.dY_TH = None
            return
        nothing = torch.zeros(0, 0, device=self._link.device)
        item.sent, rows = nothing_sent(len(ranks), self._link.device), (nothing, nothing)
        if item.rows is not None:
            x_TH, idx_TK, w_TK = item.rows
            item.sent, rows = sent_by(self._routers[action.layer].route(idx_TK), x_TH, w_TK), (x_TH, w_TK)
        item.rows = None
        send_copies(self._link, action, ranks, item.sent, rows)

    def gather(self, action: Action) -> None:
        """Add up what comes back inside the node (Y)."""
        item, answers = self._item(action), self._receives.take(action)
        sent = item.sent
        assert sent is not None
        if action.phase == "f":
            item.out = item.asked.split([sent.route.sum_copies(sent.sums_in(answers), sent.x_dtype)])
        else:
            item.out = item.asked.split(sent.gradients_in(answers))
        self._link.release(action)

    def answer(self, action: Action) -> None:
        """Send it back to the A ranks (C)."""
        item, segment = self._item(action), action.layer + (action.phase == "f")
        item.asked.answer(self._link, action, self._peers.attention_ranks(segment), item.out)
        item.out = []
        if action.phase == "b" or not self._training:
            del self._relayed[action.layer, action.micro_batch]

    def _item(self, action: Action) -> _Relayed:
        return self._relayed[action.layer, action.micro_batch]


class NodeFFNRank(FFNRank):
    """An F rank of a node where rows are spread: its experts get theirs from relays, of which it is one."""

    def __init__(
        self,
        link: Link,
        shards: Mapping[int, ExpertShard | WithShared],
        peers: Peers,
        tails: TailRank,
        routers: Mapping[int, NodeRouter],
    ) -> None:
        """`routers` have the experts of the node, by layer."""
        super().__init__(link, shards, peers, tails)
        self._relay = NodeRelay(link, routers, peers)

    def begin(self, receives: Receives, *, training: bool) -> None:
        """Start a step."""
        super().begin(receives, training=training)
        self._relay.begin(receives, training=training)

    def end(self) -> None:
        """Drop whatever is left, after the last action or an error."""
        super().end()
        self._relay.end()

    def handlers(self) -> Handlers:
        """In an exchange the relay sends on and the experts take, or these answer and the relay takes."""
        own, relay = super().handlers(), self._relay
        handlers = dict(own)
        for phase in "fb":
            handlers["D", phase], handlers["C", phase] = relay.take, relay.answer
            handlers["X", phase] = _in_turn(relay.spread, own["D", phase])
            handlers["Y", phase] = _in_turn(own["C", phase], relay.gather)
        return handlers


def _in_turn(first: Handler, then: Handler) -> Handler:
    def both(action: Action) -> None:
        first(action)
        then(action)

    return both
