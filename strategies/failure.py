"""The first cause of a failure, told by the rank that failed to all others before their connections break."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_afd.errors import PeerFailure, PlanError
from lightning_afd.namespace import MisconfigurationException

_CAUSE = "afd/cause"
_SAME_ON_ALL_RANKS = {kind.__name__: kind for kind in (PlanError, MisconfigurationException, FloatingPointError)}
"""Errors whose text holds for every rank: raised as they are."""


class FailureBoard:
    """A small key-value store of the job in which the first failing rank leaves its reason."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world

    @classmethod
    def create(cls, rank: int, world: int) -> FailureBoard:
        """Collective: rank 0 hosts the store on a free port of its host."""
        host = _own_address() if rank == 0 else ""
        store = dist.TCPStore(host, 0, world, True, timedelta(seconds=60), False) if rank == 0 else None
        address: list[Any] = [(host, store.port) if store is not None else None]
        dist.broadcast_object_list(address, src=0)
        if store is None:
            store = dist.TCPStore(*address[0], world, False, timedelta(seconds=60), False)
        return cls(store, rank, world)

    def post(self, error: BaseException) -> None:
        """Leave the reason, if nobody has left one before."""
        kind = type(error).__name__
        text = "\n".join([f"{error}", *getattr(error, "__notes__", [])])
        try:
            self._store.compare_set(_CAUSE, "", json.dumps([self._rank, kind, text]))
        except Exception:  # the store's host is gone: nobody is left to tell
            return

    def first_cause(self, error: BaseException, patience: float = 5.0) -> BaseException:
        """The error to raise on this rank: its own, or another rank's if that came first.

        Only errors of connections can be consequences; for these the reason is awaited for `patience` seconds.
        """
        deadline = time.monotonic() + (patience if _is_consequence(error) else 0.0)
        while True:
            cause = self._read()
            if cause is not None and cause[0] != self._rank:
                return _as_error(*cause)
            if cause is not None or time.monotonic() >= deadline:
                return error
            time.sleep(0.02)

    def linger(self, patience: float = 15.0) -> None:
        """Rank 0 hosts the store: it stays until the others have read the reason, or for `patience` seconds."""
        try:
            self._store.add("afd/read", 1)
            deadline = time.monotonic() + patience
            while self._rank == 0 and time.monotonic() < deadline and self._store.add("afd/read", 0) < self._world:
                time.sleep(0.02)
        except Exception:  # as above
            return

    def _read(self) -> Sequence[Any] | None:
        try:
            if not self._store.check([_CAUSE]):
                return None
            return json.loads(self._store.get(_CAUSE))  # type: ignore[no-any-return]
        except Exception:
            return None


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
    return PeerFailure(f"rank {rank} failed first with {kind}: {text}")


def _own_address() -> str:
    """The address under which other ranks reach this one: that of the job's rendezvous, which rank 0 hosts."""
    import os

    return os.environ.get("MASTER_ADDR", "127.0.0.1")
