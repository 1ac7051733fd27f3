"""S_p of a fit: fixed, or tuned over its first steps, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_afd.engine import Engine
from lightning_afd.reduction import MOST_CHUNKS
from lightning_afd.tune import Tuned, Tuner, Tuning, in_bytes

NOTE = "reduce_chunk_bytes"
"""Where a checkpoint has what was tuned, and for which plan."""
_WARM_UP = 2
"""Steps before the first sample: buffers grow, kernels are chosen."""


class ChunkSize:
    """Sets the chunk size of the engine's sums; `next_step` is to be called before each batch, on all ranks.

    Rank 0 searches, with the longest time of all ranks for each step, and tells the others: one exchange per sample.
    What was tuned goes into `notes()`, the checkpoint's, and a resumed job of the same plan takes it from there.
    """

    def __init__(
        self, wanted: int | Literal["auto"] | None, tuning: Tuning, engine: Engine, notes: Callable[[], dict[str, Any]]
    ) -> None:
        self.searches = wanted == "auto" and engine.plan.layout.attention > 1
        """Whether steps are to be timed."""
        self.tuned: Tuned | None = None
        """What this fit has found, on rank 0."""
        self._engine = engine
        self._notes = notes
        self._tuning = tuning
        self._tuner: Tuner | None = None
        self._times: list[float] = []
        self._has_begun = False
        self._skip = _WARM_UP + 1
        self._set(None if wanted == "auto" else wanted)

    def next_step(self, seconds: float | None) -> None:
        """Note how long the last step took (None: it summed nothing), and change the chunk size behind each sample."""
        if not self.searches:
            return
        if not self._has_begun:
            self._begin()
        elif seconds is not None:
            self._count(seconds)

    def _begin(self) -> None:
        """Before the first batch, when a checkpoint has been loaded."""
        self._has_begun = True
        note = self._notes().get(NOTE)
        if note is not None and note["plan"] == self._plan:
            self.searches = False
            self._set(note["bytes"])
            return
        if self._engine.rank == 0:
            self._tuner = self._tuner_for(self._engine.sums.nbytes if self._engine.sums is not None else 0)
        self.searches = bool(self._engine.collectives.broadcast_object(self._tuner is not None, 0))

    def _tuner_for(self, nbytes: int) -> Tuner | None:
        """A search among the sizes that make a difference for so many bytes; None where there are none."""
        least, most = max(self._tuning.least, nbytes // MOST_CHUNKS), min(self._tuning.most, nbytes)
        if 2 * least > most:
            rank_zero_info(f"S_p: no chunks, as attention ranks sum no more than {in_bytes(nbytes)} of gradients")
            return None
        tuner = Tuner(replace(self._tuning, least=least, most=most))
        tuner.ask()  # no chunks, as it is
        return tuner

    def _count(self, seconds: float) -> None:
        if self._skip > 0:
            self._skip -= 1
            return
        self._times.append(seconds)
        if len(self._times) == self._tuning.steps:
            everyone = self._engine.collectives.all_gather(self._times)
            self._times, self._skip = [], 1
            verdict = self._judge([max(step) for step in zip(*everyone, strict=True)])
            self._follow(self._engine.collectives.broadcast_object(verdict, 0))

    def _judge(self, seconds: list[float]) -> tuple[bool, int | None] | None:
        """On rank 0: whether the search is over, and the chunk size of the next steps."""
        if self._tuner is None:
            return None
        self._tuner.tell(seconds)
        self.tuned = self._tuner.tuned
        if self.tuned is None:
            return False, self._tuner.ask()
        rank_zero_info(f"{self.tuned} ({self._tuning.samples} samples of {self._tuning.steps} steps)")
        return True, self.tuned.chunk_bytes

    def _follow(self, verdict: Any) -> None:
        over, chunk_bytes = verdict
        self._set(chunk_bytes)
        if over:
            self.searches, self._tuner = False, None
            self._notes()[NOTE] = {"bytes": chunk_bytes, "plan": self._plan}

    @property
    def _plan(self) -> str:
        """What a tuned chunk size is good for."""
        plan = self._engine.plan
        return f"{plan.layout.describe()}, {plan.layers} layers, {plan.order}, {plan.micro_batches} micro-batches"

    def _set(self, chunk_bytes: int | None) -> None:
        if self._engine.sums is not None:
            self._engine.sums.chunk_bytes = chunk_bytes
