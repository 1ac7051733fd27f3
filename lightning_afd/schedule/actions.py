"""One step of a program and its short name, the same in plans, errors, logs and traces.

| op | what | phases |
|---|---|---|
| A | attention segment: what lies between the experts of two layers | f forward, b backward (w where b is split) |
| E | routed experts of a layer | f forward, b input gradient, w weight gradient |
| D | dispatch, A to F | f: x, idx, w; b: dY |
| C | combine, F to A | f: y; b: dx, dw |
| X | spread inside a node: an F rank sends what came to it on to those of its group there | f: x, idx, w; b: dY |
| Y | gather inside a node: their sums come back to it | f: y; b: dx, dw |
| T | the tail (norm, head, loss) where F ranks run it, as segment `layers` | f, b |
| H | hop of the base (residual stream + shared experts) between A groups, or of hidden states to a tail on F | f, b |
| L | router logits of other workers to and from the tail | f, b |
| S | place in an A program where chunks of the gradients of segments from `layer` on may go, numbered | b |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from lightning_afd.placement import Worker

Op = Literal["A", "E", "T", "D", "C", "X", "Y", "H", "L", "S"]
Phase = Literal["f", "b", "w"]
_PHASES = {"A": "fbw", "E": "fbw", "S": "b"}


@dataclass(frozen=True, slots=True)
class Action:
    """`A3f0`: attention segment 3, forward, micro-batch 0."""

    op: Op
    layer: int
    """MoE layer, or attention segment; of S the first segment whose gradients are complete."""
    phase: Phase
    micro_batch: int
    """Counted from 0; of S the number of the place."""

    def __str__(self) -> str:
        return f"{self.op}{self.layer}{self.phase}{self.micro_batch}"

    def place(self) -> str:
        """`A3f0: layer 3, micro-batch 0`, as errors name it."""
        if self.op == "S":
            return f"{self}: chunks of the gradients of segments from {self.layer} on, place {self.micro_batch}"
        return f"{self}: layer {self.layer}, micro-batch {self.micro_batch}"

    @property
    def is_transfer(self) -> bool:
        """Whether it moves data between ranks of two workers, in whose programs it stands, or of one (an exchange)."""
        return self.op in "DCXYHL"

    @property
    def is_exchange(self) -> bool:
        """Whether ranks of one worker send to one another: each sends, then waits for what the others send in it."""
        return self.op in "XY"

    @classmethod
    def parse(cls, name: str) -> Action:
        """Read `str(action)` back; raises ValueError for anything else."""
        match = re.fullmatch(r"([AETDCXYHLS])(0|[1-9]\d*)([fbw])(0|[1-9]\d*)", name, re.ASCII)
        if match is None or match[3] not in _PHASES.get(match[1], "fb"):
            raise ValueError(
                f"{name!r} is no action: expected an op of A E T D C X Y H L S, a layer, a phase f or b (w only for "
                "A and E, b alone for S) and a micro-batch, as in A3f0"
            )
        return cls(cast(Op, match[1]), int(match[2]), cast(Phase, match[3]), int(match[4]))


@dataclass(frozen=True, slots=True)
class Step:
    """An action as a rank executes it: `A0:D3f0` sends a dispatch, `F0:D3f0` receives it."""

    worker: Worker
    """As which of its workers; a rank of a collocated layout has two, and both ends of its transfers."""
    action: Action

    def __str__(self) -> str:
        return f"{self.worker}:{self.action}"

    @classmethod
    def parse(cls, name: str) -> Step:
        """Read `str(step)` back; raises ValueError for anything else."""
        worker, _, action = name.partition(":")
        return cls(Worker.parse(worker), Action.parse(action))
