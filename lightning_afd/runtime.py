"""Interpret one program: per worker a table from (op, phase) to what this rank does for it, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_afd.clock import Clock, HostClock
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.timeline import Reduce, Span

Handler = Callable[[Action], None]
Handlers = Mapping[tuple[str, str], Handler]


class Runtime:
    """Runs programs of one rank and remembers when it did what in the last one, and behind it."""

    def __init__(self, rank: int, tables: Mapping[Worker, Handlers]) -> None:
        self._rank = rank
        self._tables = tables
        self.clock: Clock = HostClock()
        """Measures the next program, and what is done behind it."""
        self._measured_by = self.clock
        self._program: Sequence[Step] = ()
        self._steps: list[Step] = []
        """The same in the order in which they were executed, without places for chunks, which are told apart."""
        self._chunks: list[int] = []
        self._marks: list[Any] = []
        """Start and end of each action."""
        self._chunk_marks: list[Any] = []
        """Start and end of each chunk."""
        self._current: tuple[Action | None, float] = None, time.perf_counter()
        self.would_wait: Callable[[Action], bool] = lambda action: False
        """Whether an action would keep the host waiting for the device, as CUDA may where counts are not there yet."""

    def run(self, program: Sequence[Step]) -> None:
        """Execute the steps in order; an exception gets a note with rank, role, layer and micro-batch."""
        self._measured_by, self._steps, self._marks = self.clock, [], []
        self._chunks, self._chunk_marks = [], []
        self._program = program
        self._measured_by.begin()
        now, mark = time.perf_counter, self._measured_by.mark
        for step in self._in_order(program):
            action = step.action
            self._current = action, now()
            start = mark()
            try:
                self._tables[step.worker][action.op, action.phase](action)
            except Exception as error:
                error.add_note(f"rank {self._rank} ({step.worker}) failed in {action.place()}")
                raise
            if action.op != "S":
                self._marks += start, mark()
                self._steps.append(step)
        self._current = None, now()

    def _in_order(self, program: Sequence[Step]) -> Iterator[Step]:
        """The steps of a program; a dispatch that would wait for the device lets the next computation go first.

        Only one of another micro-batch, and no transfer: those keep their order, and nobody waits for what is put off.
        A hop of the same layer, which needs the same counts, waits with it.
        """
        late: list[Step] = []
        for step in program:
            if late and _goes_with(step.action, late[0].action):
                late.append(step)
                continue
            overtakes = bool(late) and _may_overtake(step.action, late[0].action)
            if not overtakes:
                yield from late
                late.clear()
                if self.would_wait(step.action):
                    late.append(step)
                    continue
            yield step
            yield from late
            late.clear()
        yield from late

    @contextmanager
    def reducing(self, nbytes: int) -> Iterator[None]:
        """Around the sum of one chunk of gradients over replicas, behind a program."""
        start = self.mark()
        yield
        self.reduced(start, nbytes)

    def mark(self) -> Any:
        """The present, for `reduced`."""
        return self._measured_by.mark()

    def reduced(self, start: Any, nbytes: int) -> None:
        """A chunk of gradients, on its way since `start`, has been found to be summed."""
        self._chunk_marks += start, self.mark()
        self._chunks.append(nbytes)

    @property
    def times(self) -> list[float]:
        """Start and end (perf_counter) of each action of the last program that came to an end, in its order: that an
        action overtook a dispatch shows in the times."""
        executed = {step: (start, end) for step, start, end in self._executed()}
        return [time for step in self._program if step.action.op != "S" for time in executed[step]]

    @property
    def spans(self) -> list[Span]:
        """These actions, in the order in which they were executed."""
        both = len(self._tables) > 1
        return [
            Span(s.action, self._rank, start, end, s.worker if both else None) for s, start, end in self._executed()
        ]

    def _executed(self) -> Iterator[tuple[Step, float, float]]:
        """The actions of the last program as they were executed, with start and end."""
        times = self._measured_by.seconds(self._marks)
        return zip(self._steps, times[::2], times[1::2], strict=True)

    @property
    def reduces(self) -> list[Reduce]:
        """The chunks of gradients that were summed in it and behind it."""
        times = self._measured_by.seconds(self._chunk_marks)
        chunks = zip(self._chunks, times[::2], times[1::2], strict=True)
        return [Reduce(number, self._rank, start, end, size) for number, (size, start, end) in enumerate(chunks)]

    @property
    def current(self) -> tuple[Action | None, float]:
        """The action in work, None between programs, and since when (perf_counter); may be read by any thread."""
        return self._current


def _may_overtake(action: Action, late: Action) -> bool:
    """Whether an action may be launched before one that stands in front of it."""
    return action.op in "AET" and action.micro_batch != late.micro_batch


def _goes_with(action: Action, late: Action) -> bool:
    """Whether an action sends, beside a dispatch, what another rank needs to combine it."""
    same = (action.layer, action.phase, action.micro_batch) == (late.layer, late.phase, late.micro_batch)
    return action.op in "HL" and same
