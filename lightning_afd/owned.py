"""What one rank owns of a model: which parameters stay with it, and the values that they start from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.gradients import buckets
from lightning_afd.model.hub_import import load_pretrained
from lightning_afd.model.materialise import materialise
from lightning_afd.model.place import (
    check_head_is_apart,
    dense_parameters,
    keep_all_but_other_experts,
    keep_attention,
    keep_experts,
    keep_experts_and_tail,
    mark_placed,
    placed_at,
)
from lightning_afd.model.split import DecoderLayer, MoELayer, decoder_layers
from lightning_afd.peers import Peers
from lightning_afd.plan import Plan
from lightning_afd.transport.base import Collectives


class Owned:
    """The part of the model that belongs to one rank of a plan."""

    def __init__(self, plan: Plan, rank: int, collectives: Collectives) -> None:
        self._plan = plan
        self._layout = plan.layout
        self._rank = rank
        self._collectives = collectives
        self._peers = Peers(plan.layout, plan.shape(1), rank)
        self._roles = {worker.role for worker in plan.layout.workers_of(rank)}

    def place(self, root: nn.Module, layers: Sequence[MoELayer]) -> None:
        """Leave this rank only the parameters that it owns; the others go to the meta device under the same names.

        A model that was placed like this before stays as it is; raises PlanError where it was placed otherwise.
        """
        moved = " with shared experts on F ranks" if self._plan.shared_experts == "ffn" else ""
        place = f"rank {self._rank} of {self._layout.describe()}{moved}"
        before = placed_at(layers)
        if before is not None and before != place:
            raise PlanError(f"this model was split for {before} and cannot serve {place}: build a new one")
        if before is not None:
            return
        decoder = decoder_layers(root, layers)
        if self._layout.head == "ffn":
            check_head_is_apart(root, decoder)
        mark_placed(layers, place, self._layout)
        self._keep(root, layers, decoder)

    def _keep(self, root: nn.Module, layers: Sequence[MoELayer], decoder: Sequence[DecoderLayer]) -> None:
        owned = [layers[index] for index in self._peers.layers]
        index, maps = self._layout.index_of(self._rank), self._plan.expert_maps()
        if "F" not in self._roles:
            keep_attention(root, decoder, self._peers.owned_segments)
        elif "A" in self._roles:
            keep_all_but_other_experts(owned, maps, index)
        elif self._layout.tails_of(self._rank):
            keep_experts_and_tail(root, decoder, owned, maps, index)
        else:
            keep_experts(root, owned, maps, index)

    def materialise(self, root: nn.Module, layers: Sequence[MoELayer], device: torch.device, seed: int) -> None:
        """Collective: give what was made on the meta device its first values, from a folder where the model names one,
        and make the parameters that all ranks of a group hold equal to those of the first one.
        """
        index = self._layout.index_of(self._rank)
        ids: dict[nn.Module, Sequence[int]] = {}
        if "F" in self._roles:
            maps = self._plan.expert_maps()
            ids = {layers[layer].experts: maps[layer].rank_to_experts(index) for layer in self._peers.layers}
        load_pretrained(root, ids, device)
        materialise(root, ids, device, seed)
        if len(self._layout.copies_of(self._rank)) > 1:
            self._equalise(root, layers, device)

    def _equalise(self, root: nn.Module, layers: Sequence[MoELayer], device: torch.device) -> None:
        """A script without a seed starts every rank with other weights: replicas take those of the first one.

        The model may still be on the host, where NCCL copies nothing.
        """
        experts = {id(b) for layer in layers for b in layer.experts.buffers()}
        tensors = [p.data for p in dense_parameters(root)]
        tensors += [b for b in root.buffers() if b.device.type != "meta" and b.is_floating_point()]
        tensors = [tensor for tensor in tensors if id(tensor) not in experts]
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
            self._collectives.copy_from_first_replica(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))
