"""What an A rank keeps of one micro-batch while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lightning_afd.model.coroutine import Segment
from lightning_afd.model.input_first import WeightGradients
from lightning_afd.model.routing import Routing
from lightning_afd.segments import Gradients, MicroBatch
from lightning_afd.sent import Sent


@dataclass(eq=False)
class InFlight:
    """A micro-batch and what has arrived for it; `work` is None where this rank has no rows for it."""

    work: MicroBatch | None
    put_off: dict[int, WeightGradients] = field(default_factory=dict)
    """Weight gradients of segments whose input gradients are done; they outlive `work`."""
    segment: Segment | None = None
    routing: Routing | None = None
    """Where the tokens of `segment` go, as far as the device has found out."""
    sent: dict[int, Sent] = field(default_factory=dict)
    """Routes of own layers, and of the layers before own segments."""
    base_TH: Tensor | None = None
    h_TH: Tensor | None = None
    """Hidden states for a tail on another rank."""
    sums: list[Tensor] = field(default_factory=list)
    """What each F rank returned for the layer before the next own segment."""
    gradients: Gradients | None = None
    dh_TH: Tensor | None = None
    dx_TH: Tensor | None = None
    dw_TK: Tensor | None = None
    z_losses: list[Tensor] = field(default_factory=list)
    """Weighted router z-losses of own layers, once the micro-batch is finished."""

    def finish(self) -> None:
        """Drop the coroutine and all activations but those of weight gradients that were put off."""
        if self.work is not None:
            self.z_losses = self.work.z_losses
            self.work.close()
            self.work = None
