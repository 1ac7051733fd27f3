"""What the engine needs from a network: point-to-point messages and two small collectives, on one screen.

A message is one flat uint8 tensor that starts with a header (transport/wire.py). There is one channel per direction and
use; on a channel, messages between two ranks of the same micro-batch never overtake each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

Channel = Literal["Df", "Cf", "Db", "Cb", "Hf", "Hb", "Lf", "Lb", "Xf", "Yf", "Xb", "Yb"]
"""Direction and use: dispatch and combine, base hops and router logits, spreading and gathering inside a node, each
forward and backward."""
CHANNELS: tuple[Channel, ...] = ("Df", "Cf", "Db", "Cb")
GROUP_CHANNELS: tuple[Channel, ...] = ("Hf", "Hb", "Lf", "Lb")
"""Channels between A groups, where there are several, and to and from tails on F ranks."""
NODE_CHANNELS: tuple[Channel, ...] = ("Xf", "Yf", "Xb", "Yb")
"""Channels between F ranks of a node, where one copy of a token comes for all of them."""


class Incoming(Protocol):
    """A receive that has been posted."""

    def wait(self) -> Tensor:
        """Block until the message is there; returns the posted buffer (uint8, possibly longer than the message)."""


class Pending(Incoming, Protocol):
    """A sum that has been started."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once; costs next to nothing and does not wait for the device."""


class Transport(Protocol):
    """Point-to-point messages between the ranks of this job; ranks are global."""

    def post(self, channel: Channel, peer: int, tag: int, nbytes: int) -> Incoming:
        """Offer a buffer of `nbytes` for the message `tag` of `peer`; call it before the peer is asked to send."""

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        """Send without waiting; the transport keeps `message` alive until `release`."""

    def release(self, micro_batch: int | None = None, *, but: str = "") -> None:
        """Finish the sends of one micro-batch, known to have arrived because its reply has, or of all (None).

        Those of the ops in `but` stay.
        """


class Collectives(Protocol):
    """Small agreements between ranks; called once or twice per step."""

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values` (float64, equal lengths), by rank."""

    def broadcast_object(self, value: object, source: int) -> object:
        """The object of rank `source` on every rank."""

    def gather_object(self, value: object) -> list[Any] | None:
        """The objects of all ranks, by rank, on rank 0; None on the others."""

    def send_object(self, value: object, receiver: int) -> None:
        """Send any picklable object to one rank, which calls `receive_object`."""

    def receive_object(self, sender: int) -> object:
        """The next object that `sender` sends to this rank."""

    def start_sum(self, tensor: Tensor) -> Incoming:
        """Begin to add `tensor`, on the host, in place over all ranks; `wait()` returns it."""

    def sum_over_replicas(self, tensor: Tensor) -> None:
        """Add `tensor` in place over the ranks that hold the same dense parameters (Layout.copies_of)."""

    def start_sum_over_replicas(self, tensor: Tensor) -> Pending:
        """Begin the same on connections of its own, which no other message shares; `wait()` returns the tensor.

        All these ranks start the same sums in the same order.
        """

    def copy_from_first_replica(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with that of the first of these ranks."""


MAX_MICRO_BATCHES = 4096


def tag_of(layer: int, micro_batch: int, part: int = 0) -> int:
    """A number for the message of a layer and micro-batch, unique on its channel within a step."""
    return (layer * 2 + part) * MAX_MICRO_BATCHES + micro_batch


def name_of(channel: Channel, tag: int) -> str:
    """The action that a message belongs to (`D3f0`), for errors."""
    rest, micro_batch = divmod(tag, MAX_MICRO_BATCHES)
    layer, part = divmod(rest, 2)
    return f"{channel[0]}{layer}{channel[1]}{micro_batch}" + (" (larger buffer)" if part else "")


def micro_batch_of(tag: int) -> int:
    """The micro-batch of `tag_of`'s number."""
    return tag % MAX_MICRO_BATCHES
