"""Which ranks one rank talks to: the schedule's endpoints, worker by worker, as global ranks (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Shape


@dataclass(frozen=True)
class Peers:
    """The neighbours of one rank."""

    layout: Layout
    shape: Shape
    """Shape of any step: only its layers, groups and head are used."""
    rank: int

    @property
    def segments(self) -> tuple[int, ...]:
        """Attention segments of an A rank's group, ascending."""
        worker = self.layout.worker_of(self.rank)
        return tuple(s for s in range(self.shape.layers + 1) if self.shape.attention(s) == worker)

    @property
    def owned_segments(self) -> tuple[int, ...]:
        """Segments of the user's step that run on this rank: those of its A group, without a tail that is elsewhere."""
        tail = (self.shape.layers,) if self.layout.tails_of(self.rank) else ()
        return tuple(segment for segment in self.segments if segment < self.shape.layers) + tail

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layers of the rank's group, ascending."""
        worker = self.layout.worker_of(self.rank)
        owner = self.shape.attention if worker.role == "A" else self.shape.experts
        return tuple(layer for layer in range(self.shape.layers) if owner(layer) == worker)

    def expert_ranks(self, layer: int) -> Sequence[int]:
        """F ranks of a layer to which an A rank sends its tokens: all of them, or one per node.

        Those of a node take turns, replica after replica.
        """
        ranks = self.layout.ranks_of(self.shape.experts(layer))
        return [ranks[node[self._index % len(node)]] for node in self.nodes_of(layer)]

    def nodes_of(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Places of the F ranks of a layer in their group, by node."""
        return self.layout.nodes[self.shape.experts(layer)]

    def attention_ranks(self, segment: int) -> Sequence[int]:
        """A ranks of a segment that send tokens to this F rank, by replica."""
        return self.layout.ranks_of(self.shape.attention(segment))[self.node.index(self._place) :: len(self.node)]

    @cached_property
    def node(self) -> tuple[int, ...]:
        """Places in their group of the F ranks on the node of this one, itself included."""
        return next(node for node in self.layout.nodes[self._ffn_worker] if self._place in node)

    @cached_property
    def siblings(self) -> tuple[int, ...]:
        """These ranks."""
        ranks = self.layout.ranks_of(self._ffn_worker)
        return tuple(ranks[place] for place in self.node)

    @cached_property
    def _index(self) -> int:
        """Place of this rank in its group: the data replica of an A rank."""
        return self.layout.index_of(self.rank)

    @cached_property
    def _place(self) -> int:
        return self.layout.ranks_of(self._ffn_worker).index(self.rank)

    @property
    def _ffn_worker(self) -> Worker:
        return self.layout.workers_of(self.rank)[-1]

    def receives(self, action: Action) -> bool:
        """Whether a transfer comes to the only worker of this rank."""
        return self.shape.receives(self.layout.worker_of(self.rank), action)

    def hands_over(self, action: Action) -> bool:
        """Whether an A or H action is about hidden states for a tail on an F rank."""
        return action.layer == self.shape.layers and self.shape.hands_over()

    def receiver(self, action: Action) -> int:
        """The rank to which an A rank sends a hop or router logits."""
        return self.counterparts(action, self._index)[1]

    @property
    def _replicas(self) -> tuple[int, ...]:
        """The data replicas of an A rank, or those whose tails an F rank runs."""
        if self.layout.worker_of(self.rank).role == "F":
            return self.layout.tails_of(self.rank)
        return (self._index,)

    def counterparts(self, action: Action, replica: int) -> tuple[int, int]:
        """Sender and receiver of a hop or of router logits: the same data replica on both."""
        sender, receiver = self.shape.endpoints(action)
        return self._rank_of(sender, replica), self._rank_of(receiver, replica)

    def senders(self, action: Action) -> tuple[int, ...]:
        """The ranks whose messages this rank takes in a transfer to its worker, in the order in which they are handled;
        none where others of it have tails.
        """
        if action.is_exchange:
            return self.siblings
        if action.op == "D":
            return tuple(self.attention_ranks(action.layer + (action.phase == "b")))
        if action.op == "C":
            return tuple(self.expert_ranks(action.layer))
        return tuple(self.counterparts(action, replica)[0] for replica in self._replicas)

    def _rank_of(self, worker: Worker, replica: int) -> int:
        return self.layout.ranks_of(worker)[replica] if worker.role == "A" else self.layout.tail_rank(replica)
