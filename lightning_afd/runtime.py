"""Interpret one program: a table from (op, phase) to what this rank does for it, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.timeline import Span

Handlers = Mapping[tuple[str, str], Callable[[Action], None]]


class Runtime:
    """Runs programs of one rank and remembers the spans of the last one."""

    def __init__(self, rank: int, worker: Worker, handlers: Handlers) -> None:
        self._rank = rank
        self._worker = worker
        self._handlers = handlers
        self.spans: list[Span] = []
        self._current: tuple[Action | None, float] = None, time.perf_counter()

    def run(self, program: Sequence[Action]) -> None:
        """Execute the actions in order; an exception gets a note with rank, role, layer and micro-batch."""
        self.spans = spans = []
        now = time.perf_counter
        for action in program:
            start = now()
            self._current = action, start
            try:
                self._handlers[action.op, action.phase](action)
            except Exception as error:
                error.add_note(self._place(action))
                raise
            spans.append(Span(action, self._rank, start, now()))
        self._current = None, now()

    @property
    def current(self) -> tuple[Action | None, float]:
        """The action in work, None between programs, and since when (perf_counter); may be read by any thread."""
        return self._current

    def _place(self, action: Action) -> str:
        return f"rank {self._rank} ({self._worker}) failed in {action.place()}"
