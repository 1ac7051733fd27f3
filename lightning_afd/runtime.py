"""Interpret one program: per worker a table from (op, phase) to what this rank does for it, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.timeline import Span

Handlers = Mapping[tuple[str, str], Callable[[Action], None]]


class Runtime:
    """Runs programs of one rank and remembers the spans of the last one."""

    def __init__(self, rank: int, tables: Mapping[Worker, Handlers]) -> None:
        self._rank = rank
        self._tables = tables
        self.spans: list[Span] = []
        self._current: tuple[Action | None, float] = None, time.perf_counter()

    def run(self, program: Sequence[Step]) -> None:
        """Execute the steps in order; an exception gets a note with rank, role, layer and micro-batch."""
        self.spans = spans = []
        now = time.perf_counter
        for step in program:
            action, start = step.action, now()
            self._current = action, start
            try:
                self._tables[step.worker][action.op, action.phase](action)
            except Exception as error:
                error.add_note(f"rank {self._rank} ({step.worker}) failed in {action.place()}")
                raise
            spans.append(Span(action, self._rank, start, now(), step.worker))
        self._current = None, now()

    @property
    def current(self) -> tuple[Action | None, float]:
        """The action in work, None between programs, and since when (perf_counter); may be read by any thread."""
        return self._current
