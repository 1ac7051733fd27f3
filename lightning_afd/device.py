"""What the host may ask of a device that works behind its back, without ever waiting for all of it.

On CPUs, which have done their work when a function returns, all of this costs nothing: the callers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class HostValues:
    """A few numbers on their way from a device to the host; who needs them waits for this copy, not for the device.

    The copy goes to pinned memory: one to pageable memory would wait for all work before it.
    """

    def __init__(self, values: Tensor) -> None:
        """Start the copy of `values`, behind what the current stream has been given until now."""
        self.mark: Any = None
        """The event behind the copy, and so behind everything launched before; None where values are on the host."""
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self.mark = torch.cuda.Event()
            self.mark.record()

    def are_there(self) -> bool:
        """Whether `wait` would return at once."""
        return self.mark is None or bool(self.mark.query())

    def wait(self) -> Any:
        """The numbers, as lists like those of `Tensor.tolist`."""
        if self.mark is not None:
            self.mark.synchronize()
        return self._values.tolist()


def places_of(mask: Tensor, most: int) -> Tensor:
    """Indices [places, dimensions] of the true elements, of which there are at most `most`, in order.

    A device, which is not asked how many there are, puts zeros behind them up to `most`.
    """
    return padded_places_of(mask, most) if mask.is_cuda else mask.nonzero()


def padded_places_of(mask: Tensor, most: int) -> Tensor:
    """The same with as many rows on every device; several times as slow as `nonzero` on a CPU."""
    return torch.nonzero_static(mask, size=most, fill_value=0)


class SideStream:
    """A stream for packing messages, so that they need not queue behind computations launched in the meantime."""

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        """`api` is what makes streams, for tests."""
        self._api = api
        self._stream = api.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Work that may begin once the event `mark` has passed.

        What the current stream is given from then on begins behind it, so that tensors of either stream may be let go
        as if there were one.
        """
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with self._api.stream(self._stream):
            yield
        self._api.current_stream().wait_stream(self._stream)
