"""The user's own step as a coroutine that is suspended at MoE layers, in one OS thread.

Coroutine  one micro-batch of the step inside a greenlet, cut into segments; segment l ends with MoE layer l.
Host       knows which coroutine runs now; one per process.

Shapes: T tokens, H hidden, K experts per token.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from lightning_afd.device import HostValues
from lightning_afd.errors import PlanError
from lightning_afd.model.context import context_state, difference
from lightning_afd.model.router_output import RouterOutput


@dataclass(eq=False)
class Segment:
    """What attention segment `layer` leaves for its dispatch and its backward."""

    layer: int
    h: Tensor | None = None
    """Leaf input of the segment; None for segment 0."""
    base: Tensor | None = None
    """Output of the layer: without its routed experts, or with them where `y_TH` is part of the graph."""
    x_TH: Tensor | None = None
    idx_TK: Tensor | None = None
    w_TK: Tensor | None = None
    y_TH: Tensor | None = None
    """Leaf of the experts' sums where the layer was suspended inside; None where they are added behind it."""
    inside: bool = False
    """Whether the layer is suspended at its experts instead of behind itself."""
    wire_dtype: torch.dtype | None = None
    """Dtype in which x travels under autocast; None: as it is."""
    probed: bool = False
    """Whether this was the layer's first call, in which what stands for its shared experts is differentiated."""
    with_grad: bool = True
    """Whether autograd recorded what led to the experts."""
    logits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Router logits of the graph, each with the leaf that the rest of the model sees instead."""
    routed: Tensor | None = None
    """Router logits without a graph, for ranks on which a stand-in takes their place."""
    chained: bool = False
    """Whether the layer itself uses that leaf again (hooks that run behind the router)."""


class Coroutine:
    """One micro-batch of the user's step.

    `around` makes the context (autocast, grad mode) that is entered at each resume and left at each suspension. With a
    `seed` the coroutine has random numbers of its own, which start anew behind each MoE layer: they are the same in any
    order of micro-batches, on all A groups, and for any number of groups.
    """

    def __init__(
        self,
        host: Host,
        step: Callable[[], Any],
        around: Callable[[], AbstractContextManager[Any]],
        seed: int | None = None,
    ) -> None:
        self._host = host
        self._around = around
        self._greenlet = greenlet(step)
        self._greenlet.gr_context = contextvars.copy_context()
        self._outside: tuple[object, ...] = ()
        self._seed = seed
        self._random = None if seed is None else _random_state_of(seed)
        self.segment = Segment(layer=0)
        self.routing: RouterOutput | None = None
        """What the last router returned, here or on the rank that says so: the pattern for the stand-ins."""
        self.stand_ins: dict[int, Tensor] = {}
        """Leaves that stand for the router logits of layers on other ranks."""
        self.shape = torch.Size()
        """Shape of the hidden states that the coroutine waits for."""
        self.result: Any = None

    @property
    def started(self) -> bool:
        return bool(self._greenlet) or self.finished

    @property
    def finished(self) -> bool:
        return bool(self._greenlet.dead)

    def resume(self, value: Tensor | None = None) -> None:
        """Start, or go on with the hidden states (or experts' sums) that the coroutine waits for."""
        self._greenlet.parent = getcurrent()
        with self._around(), _own_random_numbers(self):
            self._outside = context_state()
            with self._host.running(self):
                out = self._greenlet.switch() if value is None else self._greenlet.switch(value)
        if self.finished:
            self.result = out

    def suspend(self, layer_name: str, shape: torch.Size) -> Tensor:
        """Called inside the coroutine: give control back until what it waits for has arrived."""
        state = context_state()
        if state != self._outside:
            raise PlanError(
                f"the step holds a context at {layer_name} that would leak into other micro-batches "
                f"({difference(self._outside, state)}): leave it before the model is called; activation checkpointing "
                "belongs inside the layer's forward, with use_reentrant=False"
            )
        self.shape = shape
        parent = self._greenlet.parent
        assert parent is not None
        return parent.switch()  # type: ignore[no-any-return]

    def may_suspend(self) -> bool:
        """Whether no context is held here that would leak (activation checkpointing is one)."""
        return context_state() == self._outside

    def close(self) -> None:
        """End a suspended coroutine without running the rest of it."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(GreenletExit)

    def reseed(self, segment: int) -> None:
        """Called inside the coroutine at the start of a segment: what ran before it here decides nothing."""
        if self._seed is not None:
            _set_random_state(_random_state_of(self._seed + segment))

    def swap_random_state(self) -> None:
        """Exchange the thread's random state with the coroutine's own."""
        if self._random is not None:
            outer = _random_state()
            _set_random_state(self._random)
            self._random = outer


class Host:
    """Which coroutine runs in this process, and whether a backward (recompute) runs instead."""

    def __init__(self) -> None:
        self.active: Coroutine | None = None
        self.in_backward = False
        self.shares_graph: bool | None = None
        """Whether segments have autograd operations in common; None as long as nobody has looked."""
        self.routers_checked: set[int] = set()
        """Layers of which it is known that their routers return logits."""
        self.recomputed: Segment | None = None
        """The segment whose layers a backward may compute again."""
        self.divided: set[int] = set()
        """Segments whose backward has been run in two parts, inputs first."""
        self._doubts: list[tuple[HostValues, Exception]] = []
        self.undivided: set[int] = set()
        """Segments of which it is known that their backward is better run as a whole."""

    def running(self, coroutine: Coroutine) -> SetAttribute:
        return SetAttribute(self, "active", coroutine)

    @contextmanager
    def backward(self, segment: Segment | None = None) -> Iterator[None]:
        """Context of a segment's backward: ports that are called by a recompute stay silent."""
        with SetAttribute(self, "in_backward", True), SetAttribute(self, "recomputed", segment):
            yield

    def refuse_if(self, wrong: Tensor, error: Exception) -> None:
        """Raise `error` where `wrong` is true: now, or in `settle` where the device has yet to find out."""
        found = HostValues(wrong)
        self._doubts.append((found, error))
        if found.are_there():
            self.settle()

    def settle(self) -> None:
        """Raise the first error of `refuse_if` that has come true; to be called behind a step."""
        doubts, self._doubts = self._doubts, []
        for found, error in doubts:
            if found.wait():
                raise error

    def require(self, name: str) -> Coroutine:
        """The running coroutine; PlanError where a layer is called outside of a step."""
        if self.active is None:
            raise PlanError(
                f"{name} was called outside of a training, validation, test or predict step: "
                "its experts live on other ranks, so the model can only run inside a step of the Trainer"
            )
        return self.active


class SetAttribute:
    """Set an attribute for the time of a with-block."""

    def __init__(self, target: object, name: str, value: object) -> None:
        self._target, self._name, self._value = target, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._target, self._name)
        setattr(self._target, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        setattr(self._target, self._name, self._before)


@contextmanager
def _own_random_numbers(coroutine: Coroutine) -> Iterator[None]:
    coroutine.swap_random_state()
    try:
        yield
    finally:
        coroutine.swap_random_state()


def _random_state() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def _random_state_of(seed: int) -> tuple[Tensor, Tensor | None]:
    """The random state that `torch.manual_seed(seed)` would set, without setting it."""
    if not torch.cuda.is_initialized():
        return torch.Generator().manual_seed(seed).get_state(), None
    outer = _random_state()
    torch.manual_seed(seed)
    state = _random_state()
    _set_random_state(outer)
    return state
