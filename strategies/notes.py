"""What the ranks of a job tell one another when it fails: a small key-value store, and how its keys are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

from lightning_afd.errors import PeerFailure
from lightning_afd.placement import Layout
from lightning_afd.strategies.launcher import describe_exit

_CAUSE = "afd/cause"
_CLOSED = "afd/closed"
_ALARMED, _JUDGED = "afd/alarmed", "afd/judged"
ALARM, STOP = "alarm", "stop"
"""What wakes the watching thread of a rank."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a rank is doing."""

    place: str
    """An action with its layer and micro-batch, or where the user's own code runs."""
    seconds: float
    """For how long."""
    state: Literal["computes", "outside", "waits"]
    """Whether it computes, runs what is no part of a step, or waits for another rank."""


class Notes:
    """One connection to the store; every call is silent where the store's host, rank 0, has ended."""

    def __init__(self, store: Any, rank: int, layout: Layout) -> None:
        self._store = store
        self._rank = rank
        self._layout = layout

    def rename(self, layout: Layout) -> None:
        """From now on ranks are named by their roles in this layout."""
        self._layout = layout

    def leave_cause(self, kind: str, text: str) -> None:
        """Leave the reason of the failure, if nobody has left one before, and wake all ranks."""
        self._try("compare_set", _CAUSE, "", json.dumps([self._rank, kind, text]))
        self.alarm()

    def cause(self) -> Sequence[Any] | None:
        """Rank, kind and text of the reason that somebody left."""
        return json.loads(self._store.get(_CAUSE)) if self._try("check", [_CAUSE]) else None

    def alarm(self) -> None:
        """Wake the watching threads of all ranks; one rank does it, so that the store gets one request per rank."""
        if self._is_first(_ALARMED):
            self._tell(range(self._layout.world), ALARM)

    def stop(self) -> None:
        """Wake this rank's watching thread, as its work is done."""
        self._tell([self._rank], STOP)

    def dismiss(self) -> None:
        """The store is taken away though some ranks are still busy: to them its end shall be no alarm."""
        self._tell(range(self._layout.world), STOP)

    def may_judge(self) -> bool:
        """Whether this rank, the first to ask, is the one that finds out who is to blame."""
        return self._is_first(_JUDGED)

    def answer(self, activity: Activity) -> None:
        """Say what this rank is doing."""
        self._try("set", _alive(self._rank), json.dumps(asdict(activity)))

    def wait(self) -> str:
        """Blocks this connection until there is an alarm or a stop for this rank; the end of the store is an alarm."""
        self._try("wait", [_alarm(self._rank)], timedelta(days=3650))
        word = self._try("get", _alarm(self._rank))
        return ALARM if word is None else word.decode()

    def exited(self, rank: int, code: int) -> None:
        """The process of a rank has ended without success."""
        self._try("set", _exit(rank), str(code))
        self.alarm()

    def close(self) -> None:
        """This rank needs the store no more."""
        self._try("add", _CLOSED, 1)

    def all_closed(self) -> bool:
        """Whether only ranks whose processes have ended can still need the store."""
        living = sum(not self._try("check", [_exit(rank)]) for rank in range(self._layout.world))
        return (self._try("add", _CLOSED, 0) or 0) >= living

    def verdict(self, seen: str) -> str:
        """Who is to blame where nobody left a cause: who is silent, else who computes for the longest.

        `seen` is what this rank noticed.
        """
        first = f"{self._name(self._rank)} noticed it first: {seen}"
        if self._try("check", [_alarm(self._rank)]) is None:
            return f"{self._name(0)}, which hosts the job's failure board, stopped without a word; {first}"
        answers = {rank: self._answer(rank) for rank in range(self._layout.world)}
        silent = [rank for rank, answer in answers.items() if answer is None]
        if silent:
            return f"{', '.join(map(self._ended, silent))} stopped without a word (killed, out of memory?); {first}"
        rank, slowest = max(
            ((rank, a) for rank, a in answers.items() if a is not None), key=lambda item: _guilt(item[1])
        )
        if slowest.state == "waits":
            return f"a connection broke while all ranks waited for one another (network?); {first}"
        return f"{self._name(rank)} does not get ahead: since {slowest.seconds:.0f} s it is {slowest.place}; {first}"

    def _answer(self, rank: int) -> Activity | None:
        found = self._try("check", [_alive(rank)])
        return Activity(**json.loads(self._store.get(_alive(rank)))) if found else None

    def _ended(self, rank: int) -> str:
        code = f" [{describe_exit(int(self._store.get(_exit(rank))))}]" if self._try("check", [_exit(rank)]) else ""
        return f"{self._name(rank)}{code}"

    def _name(self, rank: int) -> str:
        return self._layout.name_of(rank)

    def _tell(self, ranks: Iterable[int], word: str) -> None:
        for rank in ranks:
            self._try("compare_set", _alarm(rank), "", word)

    def _is_first(self, key: str) -> bool:
        """Whether nobody has asked before, or nobody can be asked."""
        return self._try("add", key, 1) in (1, None)

    def _try(self, operation: str, *args: Any) -> Any:
        try:
            return getattr(self._store, operation)(*args)
        except Exception:  # the store's host is gone: nobody is left to tell
            return None


def describe_cause(rank: int, kind: str, text: str) -> str:
    """What another rank says about a reason that somebody left; a verdict is somebody's who has found it out."""
    if kind == PeerFailure.__name__:
        return text
    return f"rank {rank} failed first with {kind}{f': {text}' if text else ''}"


def _alarm(rank: int) -> str:
    return f"afd/alarm/{rank}"


def _alive(rank: int) -> str:
    return f"afd/alive/{rank}"


def _exit(rank: int) -> str:
    return f"afd/exit/{rank}"


def _guilt(answer: Activity) -> tuple[int, float]:
    return ("waits", "outside", "computes").index(answer.state), answer.seconds
