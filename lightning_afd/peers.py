"""Which ranks one rank talks to: the schedule's endpoints, worker by worker, as global ranks (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_afd.placement import Layout
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Shape


@dataclass(frozen=True)
class Peers:
    """The neighbours of one rank."""

    layout: Layout
    shape: Shape
    """Shape of any step: only its layers and groups are used."""
    rank: int

    @property
    def ffn(self) -> int:
        """F ranks per group."""
        return self.layout.ffn

    @property
    def segments(self) -> tuple[int, ...]:
        """Attention segments of an A rank's group, ascending."""
        worker = self.layout.worker_of(self.rank)
        return tuple(s for s in range(self.shape.layers + 1) if self.shape.attention(s) == worker)

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layers of the rank's group, ascending."""
        group = self.layout.worker_of(self.rank).group
        return tuple(layer for layer in range(self.shape.layers) if self.shape.experts(layer).group == group)

    def expert_ranks(self, layer: int) -> range:
        """F ranks of a layer."""
        return self.layout.ranks_of(self.shape.experts(layer))

    def attention_ranks(self, segment: int) -> range:
        """A ranks of a segment, by replica."""
        return self.layout.ranks_of(self.shape.attention(segment))

    def counterparts(self, action: Action) -> tuple[int, int]:
        """Sender and receiver of a transfer between A groups: the same replica on both."""
        index = self.layout.index_of(self.rank)
        sender, receiver = self.shape.endpoints(action)
        return self.layout.ranks_of(sender)[index], self.layout.ranks_of(receiver)[index]
