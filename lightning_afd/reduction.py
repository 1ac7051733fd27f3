"""Dense gradients of data replicas, summed in chunks of S_p bytes while the step still runs (FlowMoE).

The gradients of a rank are taken as one row of numbers, in the order in which segments are completed, and cut every S_p
bytes, whatever parameter lies there. At a place of the program (S) the next chunk starts if all of it is complete and
the chunk before has arrived: one is on its way at a time, behind the dispatches that were ready, on connections of its
own. What is left when the program ends follows at once. Cuts and order depend on the parameters alone, so they are the
same on all ranks of a group, also on one without rows; only when a chunk starts depends on the rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_afd.errors import PlanError
from lightning_afd.gradients import Around, GradientStash, add_over_replicas, multiply, sum_over_replicas
from lightning_afd.schedule.actions import Action
from lightning_afd.transport.base import Collectives, Pending

MOST_CHUNKS = 1024
"""Chunks per step: an S_p that would need more is taken for the one that needs so many."""
DRAIN_BYTES = 32 * 2**20
"""What may be on its way when the program has ended and nothing else is to be sent."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a chunk: the numbers `start` to `stop` of the gradient of one parameter."""

    parameter: int
    start: int
    stop: int


def cut(parameters: Sequence[Tensor], chunk_bytes: int) -> list[tuple[Piece, ...]]:
    """Cut a row of parameters every `chunk_bytes`, rounded up to one number, and where the dtype changes.

    At most MOST_CHUNKS chunks, and one more per change of the dtype.
    """
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    limit = max(chunk_bytes, -(-total // MOST_CHUNKS))
    chunks: list[tuple[Piece, ...]] = []
    chunk: list[Piece] = []
    room, dtype = 0, None
    for number, parameter in enumerate(parameters):
        start = 0
        while start < parameter.numel():
            if room == 0 or parameter.dtype != dtype:
                chunks += [tuple(chunk)] if chunk else []
                chunk, room, dtype = [], -(-limit // parameter.element_size()), parameter.dtype
            stop = min(parameter.numel(), start + room)
            chunk.append(Piece(number, start, stop))
            room -= stop - start
            start = stop
    return [*chunks, tuple(chunk)] if chunk else chunks


class Meter(Protocol):
    """Who wants to know how long chunks take (Runtime)."""

    def mark(self) -> Any:
        """The present."""

    def reduced(self, start: Any, nbytes: int) -> None:
        """A chunk has been summed that started at the mark `start`."""


class _NobodyAsks:
    """A meter for sums that nobody measures."""

    def mark(self) -> None: ...

    def reduced(self, start: Any, nbytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Flying:
    """A chunk on its way; `buffer` holds a copy of its pieces, or is the only one of them."""

    sum: Pending
    pieces: Sequence[Tensor]
    buffer: Tensor
    started: Any

    def land(self) -> None:
        """Wait for the sum, and put it where the pieces came from."""
        self.sum.wait()
        if len(self.pieces) > 1:
            parts = self.buffer.split([piece.numel() for piece in self.pieces])
            torch._foreach_copy_(list(self.pieces), list(parts))


class ChunkedSum:
    """Sums the gradients of one rank's dense parameters over its replicas, step by step.

    Per step: `begin`, then the program with its places (`handlers`), `end`, and `install`, which waits. A gradient that
    comes after its segment was complete, as of a parameter that segments share unnoticed, is summed apart at the end.
    """

    def __init__(self, segments: Mapping[nn.Parameter, int], collectives: Collectives) -> None:
        self.chunk_bytes: int | None = None
        """S_p; None: this object is not used."""
        self.active = False
        """Whether the step that is in work is summed here."""
        self.meter: Meter = _NobodyAsks()
        self._collectives = collectives
        self._row = sorted(segments.items(), key=lambda item: -item[1])
        self._parameters: list[nn.Parameter] = []
        self._segments: list[int] = []
        self._chunks: list[tuple[Piece, ...]] = []
        self._cut_for: tuple[int | None, list[bool]] = None, []
        self._earlier: list[Tensor | None] | None = None
        self._factor: Tensor | None = None
        self._grads: list[Tensor] = []
        self._used: list[bool] = []
        self._late: list[Tensor | None] = []
        self._flying: deque[_Flying] = deque()
        self._started = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, trained or not."""
        return sum(parameter.numel() * parameter.element_size() for parameter, _ in self._row)

    def begin(self, factor: Tensor | None) -> None:
        """Start a step. With a `factor`, `grad` holds gradients of earlier batches of the window: they are summed, too,
        those of this batch being multiplied by it.
        """
        self._land(all_of_them=True)  # of a step without backward
        self._cut()
        self.active, self._factor = True, factor
        self._earlier = None if factor is None else [parameter.grad for parameter in self._parameters]
        self._grads, self._used, self._late, self._started = [], [], [], 0

    def handlers(self) -> dict[tuple[str, str], Callable[[Action], None]]:
        return {("S", "b"): self._reach}

    def end(self) -> None:
        """Take what came late; to be called behind the program, while `grad` holds gradients of this step only."""
        self._take(lambda segment: True)
        self._late = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def install(self, factor: Tensor) -> None:
        """Wait for the sums and put them, multiplied by `factor`, into `grad`.

        A parameter without gradient on all replicas keeps what it has.
        """
        self._drain()
        used, late = self._ask_for_use()
        if late:
            add_over_replicas([grad for _, grad in late], self._collectives)
            for number, grad in late:
                self._grads[number].add_(self._scaled(grad))
        kept = [number for number, is_used in enumerate(used) if is_used]
        self._put([self._parameters[number] for number in kept], [self._grads[number] for number in kept], factor)
        self.active, self._grads, self._late, self._earlier = False, [], [], None

    # -- during the program ---------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Which parameters train may change between steps, and S_p too."""
        asked = self.chunk_bytes, [parameter.requires_grad for parameter, _ in self._row]
        if asked != self._cut_for:
            assert self.chunk_bytes is not None
            trained = [(parameter, segment) for parameter, segment in self._row if parameter.requires_grad]
            self._parameters = [parameter for parameter, _ in trained]
            self._segments = [segment for _, segment in trained]
            self._chunks = cut(self._parameters, self.chunk_bytes)
            self._cut_for = asked

    def _reach(self, action: Action) -> None:
        """A place of the program: take what is complete, start the next chunk if none is on its way."""
        self._take(lambda segment: segment >= action.layer)
        self._land()
        if not self._flying:
            self._start()

    def _take(self, complete: Callable[[int], bool]) -> None:
        """Take the gradients of complete segments out of `grad`, in which later ones would show."""
        for number in range(len(self._grads), len(self._parameters)):
            if not complete(self._segments[number]):
                return
            parameter = self._parameters[number]
            grad, parameter.grad = parameter.grad, None
            earlier = None if self._earlier is None else self._earlier[number]
            self._used.append(grad is not None or earlier is not None)
            self._grads.append(self._joined(parameter, grad, earlier))

    def _joined(self, parameter: nn.Parameter, grad: Tensor | None, earlier: Tensor | None) -> Tensor:
        """What this rank brings to the sum, contiguous: zeros where it has nothing."""
        if grad is None:
            joined = torch.zeros_like(parameter) if earlier is None else earlier
        else:
            joined = self._scaled(grad) if earlier is None else earlier.add_(self._scaled(grad))
        return joined.contiguous()

    def _scaled(self, grad: Tensor) -> Tensor:
        return grad if self._factor is None else grad.mul_(self._factor)

    def _start(self) -> int:
        """Start the next chunk if there is one and all of it is complete; returns its bytes."""
        if self._started == len(self._chunks) or self._chunks[self._started][-1].parameter >= len(self._grads):
            return 0
        chunk = self._chunks[self._started]
        pieces = [self._grads[piece.parameter].view(-1)[piece.start : piece.stop] for piece in chunk]
        buffer = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        started = self.meter.mark()
        self._flying.append(_Flying(self._collectives.start_sum_over_replicas(buffer), pieces, buffer, started))
        self._started += 1
        return buffer.nbytes

    def _land(self, *, all_of_them: bool = False) -> None:
        while self._flying and (all_of_them or self._flying[0].sum.is_done()):
            chunk = self._flying.popleft()
            chunk.land()
            self.meter.reduced(chunk.started, chunk.buffer.nbytes)

    # -- behind the program ---------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Send the rest, of which nothing has to wait for anything any more, but not all copies at once."""
        while self._started < len(self._chunks):
            nbytes = 0
            while nbytes < DRAIN_BYTES and (more := self._start()):
                nbytes += more
            self._land(all_of_them=True)
        self._land(all_of_them=True)

    def _ask_for_use(self) -> tuple[list[bool], list[tuple[int, Tensor]]]:
        """Which parameters have a gradient on any replica, and which came late on any, with this rank's part."""
        if not self._parameters:
            return [], []
        own = [[float(used) for used in self._used], [float(late is not None) for late in self._late]]
        asked = torch.tensor(own, device=self._parameters[0].device)
        self._collectives.sum_over_replicas(asked)
        used, late = asked.tolist()
        return [bool(a or b) for a, b in zip(used, late, strict=True)], list(self._late_parts(late))

    def _late_parts(self, late: Sequence[float]) -> Iterator[tuple[int, Tensor]]:
        for number, count in enumerate(late):
            if count:
                part = self._late[number]
                yield number, torch.zeros_like(self._parameters[number]) if part is None else part

    def _put(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor], factor: Tensor) -> None:
        if self._factor is None:
            multiply(grads, factor)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
            return
        if not torch.equal(factor, self._factor):
            raise PlanError(
                f"the loss of the last batch of an accumulation window was scaled by {factor.item():g} for backward, "
                f"that of the batch before by {self._factor.item():g}: scale them alike, or set reduce_chunk_bytes=None"
            )
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


class StepGradients:
    """The gradients of a rank's batches on their way from the pipeline to `grad`, and their sum over replicas.

    Only the last batch of an accumulation window is followed by a sum; it goes in chunks on the way where `sums` has an
    S_p, else all at once in `install`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dense: Sequence[nn.Parameter],
        sums: ChunkedSum | None,
        collectives: Collectives,
        around: Around = lambda nbytes: nullcontext(),
    ) -> None:
        self._around = around
        self._stash = GradientStash(parameters)
        self._dense = dense
        self._sums = sums
        self._collectives = collectives
        self._factor: Tensor | None = None
        """By which the gradients of earlier batches of the window were multiplied; None in the first batch."""

    def begin(self, *, last: bool) -> None:
        """Before the pipeline runs; `last` in the window."""
        if self._sums is not None:
            self._sums.active = False
            if last and self._sums.chunk_bytes is not None:
                self._sums.begin(self._factor)
        self._stash.begin()

    def end(self) -> None:
        """Behind it."""
        if self._sums is not None and self._sums.active:
            self._sums.end()
        self._stash.end()

    def install(self, factor: Tensor, *, last: bool) -> None:
        """In Lightning's backward, which multiplies the loss by `factor`."""
        self._stash.install(factor)
        if self._sums is not None and self._sums.active:
            self._sums.install(factor)
        elif last:
            sum_over_replicas(self._dense, self._collectives, self._around)
        self._factor = None if last else factor
