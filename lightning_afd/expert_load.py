"""How many tokens each expert was given: counted where tokens are dispatched, summed over all ranks by one message.

Shapes: L MoE layers, E experts (of the layer with the most), T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_afd.transport.base import Collectives, Incoming


def load_figures(load_E: Tensor) -> dict[str, float]:
    """What one layer's tokens per expert (at least one token) say: busiest over mean expert, experts without any."""
    return {
        "max_over_mean": float(load_E.max() * load_E.numel() / load_E.sum()),
        "dead_experts": float((load_E == 0).sum()),
    }


class ExpertCounts:
    """Exact counts of this rank's dispatches of training steps, since the last optimizer step.

    All tokens that a router saw count, padding included; recompute and validation count nothing.
    """

    def __init__(self, experts: Sequence[int], device: torch.device) -> None:
        self.enabled = False
        """Whether anybody wants to know, in every step."""
        self.recording = False
        """Whether the batch that runs is recorded."""
        self._experts = tuple(experts)
        self._counts_LE = torch.zeros(len(experts), max(experts), dtype=torch.int64, device=device)
        self._over = False

    def add(self, layer: int, idx_TK: Tensor) -> None:
        """Count the experts (global ids) that one micro-batch's tokens go to; does not wait for the device."""
        if not (self.enabled or self.recording):
            return
        if self._over:
            self._counts_LE.zero_()
            self._over = False
        chosen = idx_TK.flatten().long()
        self._counts_LE[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def so_far(self) -> Tensor:
        """What the window has counted until now, [L, E] on the host; behind its end the next one begins."""
        if self._over:
            self._counts_LE.zero_()
            self._over = False
        return self._counts_LE.to("cpu", copy=True)

    def end_window(self) -> None:
        """An accumulation window has ended: its counts stay until the next one begins."""
        self._over = True

    def start_sum(self, collectives: Collectives) -> Incoming:
        """Collective: begin to add the counts of all ranks; `wait()` gives them, [L, E] on the host."""
        return collectives.start_sum(self._counts_LE.to("cpu", copy=True))

    def by_layer(self, counts_LE: Tensor) -> tuple[Tensor, ...]:
        """The counts of each layer, as long as it has experts."""
        return tuple(counts_E[:experts] for counts_E, experts in zip(counts_LE, self._experts, strict=True))
