"""The first cause of a failure, agreed between all ranks before their connections break.

A rank that fails leaves its reason on the board and raises the alarm. Where only a broken connection is seen, nobody
may have left one: a thread of each rank answers the alarm with what its rank is doing, also while the main thread
waits or hangs, so that a rank which has died is known by its silence and one which hangs by its answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_afd.errors import PeerFailure, PlanError
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import Layout
from lightning_afd.strategies.notes import Activity, Notes, describe_cause
from lightning_afd.strategies.watch import Watch

_SAME_ON_ALL_RANKS = {kind.__name__: kind for kind in (PlanError, MisconfigurationException, FloatingPointError)}
"""Errors whose text holds for every rank: raised as they are."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds that a failing job gives its ranks."""

    cause: float = 5.0
    """For somebody's reason, after a connection broke."""
    readers: float = 15.0
    """For the others to stop, before rank 0 takes the board away."""
    end: float = 20.0
    """For the main thread of a rank to stop by itself, after the alarm."""


@dataclass(frozen=True, kw_only=True)
class FailureBoard:
    """Where the first failing rank leaves its reason."""

    rank: int
    notes: Notes
    watch: Watch
    patience: Patience

    @classmethod
    def create(cls, rank: int, layout: Layout, look: Callable[[], Activity], patience: Patience) -> FailureBoard:
        """Collective: rank 0 hosts the store on a free port of its host; `look` says what this rank is doing."""
        host = _own_address() if rank == 0 else ""
        store = dist.TCPStore(host, 0, layout.world, True, timedelta(seconds=60), False) if rank == 0 else None
        address: list[Any] = [(host, store.port) if store is not None else None]
        dist.broadcast_object_list(address, src=0)

        def connect() -> Any:
            return dist.TCPStore(*address[0], layout.world, False, timedelta(seconds=60), False)

        # The thread has a connection of its own: one that waits for a key serves nobody else.
        watch = Watch(Notes(connect(), rank, layout), rank, look, patience.end)
        watch.start()
        return cls(rank=rank, notes=Notes(store or connect(), rank, layout), watch=watch, patience=patience)

    def post(self, error: BaseException) -> None:
        """Leave the reason, if nobody has left one before, and wake the other ranks."""
        self.notes.leave_cause(type(error).__name__, "\n".join([f"{error}", *getattr(error, "__notes__", [])]))

    def rename(self, layout: Layout) -> None:
        """From now on ranks are named by their roles in this layout."""
        self.notes.rename(layout)
        self.watch.rename(layout)

    def child_ended(self, rank: int, code: int) -> None:
        """A process of this host has ended without success, which other ranks may not notice."""
        self.notes.exited(rank, code)

    def first_cause(self, error: BaseException) -> BaseException:
        """The error to raise on this rank: its own, or another rank's if that came first.

        Only errors of connections can be consequences; for these the reason is awaited, or else found out.
        """
        if not _is_consequence(error):
            cause = self.notes.cause()
            return error if cause is None or cause[0] == self.rank else _as_error(*cause)
        self.notes.alarm()
        cause = self._wait_for_cause()
        if cause is None and not self.notes.may_judge():
            cause = self._wait_for_cause()
        if cause is None:
            seen = "; ".join(getattr(error, "__notes__", [])) or f"{type(error).__name__}: {error}"
            verdict = self.notes.verdict(seen)
            self.notes.leave_cause(PeerFailure.__name__, verdict)
            cause = self.notes.cause() or (self.rank, PeerFailure.__name__, verdict)
        return _as_error(*cause)

    def _wait_for_cause(self) -> Sequence[Any] | None:
        deadline = time.monotonic() + self.patience.cause
        while (cause := self.notes.cause()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return cause

    def close(self) -> None:
        """This rank stops by itself; rank 0, which hosts the store, stays until the others have stopped as well."""
        self.watch.stop(self.notes)
        self.notes.close()
        deadline = time.monotonic() + self.patience.readers
        while self.rank == 0 and not self.notes.all_closed() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.rank == 0:
            self.notes.dismiss()


def _is_consequence(error: BaseException) -> bool:
    """Whether a broken connection or a time-out, not this rank's own work, raised the error."""
    text = str(error).lower()
    return isinstance(error, ConnectionError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "nccl", "connection", "process group"))
    )


def _as_error(rank: int, kind: str, text: str) -> BaseException:
    if kind in _SAME_ON_ALL_RANKS:
        return _SAME_ON_ALL_RANKS[kind](text)
    return PeerFailure(describe_cause(rank, kind, text))


def _own_address() -> str:
    """The address under which other ranks reach this one: that of the job's rendezvous, which rank 0 hosts."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")
