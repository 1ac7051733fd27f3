"""What the checks on a GPU have in common: sizes, rows of the table, and the device that they ask."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tiny import TinyConfig

WAITS = "called a synchronizing CUDA operation"
"""How torch reports one; that its reports are a prototype is another warning."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the checks are."""

    model: TinyConfig
    length: int
    """Tokens per row."""
    rows: int
    """Tokens of the expert kernels that are timed."""
    repetitions: int


SMALL = Sizes(model=TinyConfig(hidden=16, expert_width=8, layers=2, vocab=32), length=6, rows=64, repetitions=1)
LARGE = Sizes(
    model=TinyConfig(hidden=2048, expert_width=1024, layers=4, experts=32, top_k=4, heads=16, vocab=4096),
    length=2048,
    rows=16384,
    repetitions=20,
)


@dataclass(frozen=True)
class Row:
    """One line of the table; `ok` is None for a figure that nobody can be wrong about."""

    name: str
    value: float
    unit: str = ""
    ok: bool | None = None
    note: str = ""


class Device:
    """The device under test; on a CPU nothing has to be waited for."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_gpu = self.torch.type == "cuda"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repetitions: int) -> float:
        """Seconds of a call, in the mean of several behind a first one."""
        call()
        self.wait()
        start = time.perf_counter()
        for _ in range(repetitions):
            call()
        self.wait()
        return (time.perf_counter() - start) / repetitions

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """The places where the host waited for the device, as torch reports them."""
        places: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if self.is_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                if self.is_gpu:
                    torch.cuda.set_sync_debug_mode("default")
        places += [f"{w.filename}:{w.lineno}" for w in caught if WAITS in str(w.message)]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    marks = {None: "", True: "ok", False: "WRONG"}
    width = max(len(row.name) for row in rows)
    return "\n".join(
        f"{row.name:{width}} {row.value:12.4g} {row.unit:8} {marks[row.ok]:6}{row.note}".rstrip() for row in rows
    )
