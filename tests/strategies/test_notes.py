"""Whom the ranks blame when connections break: who is silent, else who computes, else who is in the user's code."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from lightning_afd.placement import Layout, Worker
from lightning_afd.runtime import Runtime
from lightning_afd.schedule.actions import Step
from lightning_afd.strategies.notes import ALARM, STOP, Activity, Notes
from lightning_afd.strategies.watch import Watch, activity_of

LAYOUT = Layout(attention=2, ffn=2)
WAITS = Activity(place="in C1f0: layer 1, micro-batch 0", seconds=900.0, state="waits")
IDLE = Activity(place="outside of a step", seconds=50.0, state="outside")
COMPUTES = Activity(place="in E1f0: layer 1, micro-batch 0", seconds=5.0, state="computes")


def notes_of(store: Any, rank: int = 0) -> Notes:
    """What a rank of 2A+2F sees."""
    return Notes(store, rank, LAYOUT)


def verdict(*answers: Activity | None, exits: dict[int, int] | None = None) -> str:
    """Rank 0's, after all ranks that can have answered."""
    store = dist.HashStore()
    notes_of(store).alarm()
    for rank, code in (exits or {}).items():
        notes_of(store).exited(rank, code)
    for rank, answer in enumerate(answers):
        if answer is not None:
            notes_of(store, rank).answer(answer)
    return notes_of(store).verdict("broken")


def test_a_silent_rank_is_to_blame_whatever_the_others_do() -> None:
    said = verdict(WAITS, COMPUTES, IDLE, None)
    assert said.startswith("rank 3 (F0) stopped without a word")
    assert said.endswith("rank 0 (A0) noticed it first: broken")


def test_exit_codes_of_silent_ranks_are_told() -> None:
    said = verdict(WAITS, None, WAITS, None, exits={1: 3, 3: -9})
    assert said.startswith("rank 1 (A0) [exit code 3], rank 3 (F0) [signal SIGKILL] stopped without a word")


@pytest.mark.parametrize(
    ("answers", "start"),
    [
        (
            (WAITS, IDLE, WAITS, COMPUTES),
            "rank 3 (F0) does not get ahead: since 5 s it is in E1f0: layer 1, micro-batch 0",
        ),
        ((WAITS, COMPUTES, WAITS, WAITS), "rank 1 (A0) does not get ahead: since 5 s"),
        ((WAITS, IDLE, WAITS, WAITS), "rank 1 (A0) does not get ahead: since 50 s it is outside of a step"),
        ((WAITS, WAITS, WAITS, WAITS), "a connection broke while all ranks waited for one another"),
    ],
)
def test_a_rank_that_waits_is_never_to_blame(answers: tuple[Activity, ...], start: str) -> None:
    """An F rank without tokens, or an A rank without data, waits longer than anybody else."""
    assert verdict(*answers).startswith(start)


def test_who_computes_for_the_longest_is_to_blame() -> None:
    slow = Activity(place="in A2f1: layer 2, micro-batch 1", seconds=70.0, state="computes")
    assert verdict(COMPUTES, slow, WAITS, COMPUTES).startswith(
        "rank 1 (A0) does not get ahead: since 70 s it is in A2f1"
    )


class Gone:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("connection reset by peer")


def test_without_the_store_its_host_is_to_blame_and_nothing_raises() -> None:
    notes = notes_of(Gone(), rank=2)
    notes.leave_cause("ValueError", "boom")
    notes.answer(COMPUTES)
    notes.exited(1, 1)
    notes.close()
    assert notes.cause() is None
    assert notes.verdict("broken").startswith(
        "rank 0 (A0), which hosts the job's failure board, stopped without a word"
    )


def test_the_end_of_the_store_wakes_a_rank_like_an_alarm() -> None:
    assert notes_of(Gone()).wait() == ALARM
    store = dist.HashStore()
    notes_of(store, 1).stop()
    notes_of(store).alarm()
    assert [notes_of(store, rank).wait() for rank in range(4)] == [ALARM, STOP, ALARM, ALARM]


def test_the_first_cause_stays() -> None:
    store = dist.HashStore()
    notes_of(store, 1).leave_cause("ValueError", "boom")
    notes_of(store, 2).leave_cause("LookupError", "bang")
    assert notes_of(store, 3).cause() == [1, "ValueError", "boom"]


def test_ranks_whose_processes_have_ended_need_the_store_no_more() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        notes_of(store, rank).close()
    assert not notes_of(store).all_closed()
    notes_of(store).exited(2, 1)
    assert not notes_of(store).all_closed()
    notes_of(store).exited(3, -9)
    assert notes_of(store).all_closed()


def test_an_alarm_is_answered_while_the_main_thread_works() -> None:
    store = dist.HashStore()
    watch = Watch(notes_of(store, 3), 3, lambda: COMPUTES, patience=600.0)
    watch.start()
    notes_of(store).alarm()
    store.wait(["afd/alive/3"])
    assert '"computes"' in store.get("afd/alive/3").decode()
    watch.stop(notes_of(store, 3))


def look(runtime: Runtime, seen: list[Activity]) -> None:
    """Write down what another thread sees meanwhile."""
    watcher = threading.Thread(target=lambda: seen.append(activity_of(runtime)))
    watcher.start()
    watcher.join()


def test_actions_are_seen_from_another_thread() -> None:
    seen: list[Activity] = []
    runtime = Runtime(3, {Worker("F", 0): {(op, "f"): lambda _: look(runtime, seen) for op in "DE"}})
    runtime.run([Step.parse("F0:D1f0"), Step.parse("F0:E1f0")])
    assert [(a.place, a.state) for a in (*seen, activity_of(runtime), activity_of(None))] == [
        ("in D1f0: layer 1, micro-batch 0", "waits"),
        ("in E1f0: layer 1, micro-batch 0", "computes"),
        ("outside of a step", "outside"),
        ("before its first step", "outside"),
    ]


def test_a_collective_outside_of_a_step_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that waits for the step's first exchange would look as guilty as one whose data hang."""
    seen: list[Activity] = []
    runtime = Runtime(3, {})

    def inside() -> Any:
        look(runtime, seen)
        raise StopIteration

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", inside)
    with pytest.raises(StopIteration):
        dist.barrier()
    assert [(a.place, a.state) for a in seen] == [("outside of a step, in barrier", "waits")]


def test_ranks_that_are_dismissed_may_go_on_without_the_store() -> None:
    """Rank 0 is done and takes the store away while another rank still works: the others are not ended by force."""
    store = dist.HashStore()
    notes_of(store).dismiss()
    assert notes_of(store, 3).wait() == STOP
    notes_of(store, 1).alarm()
    assert notes_of(store, 3).wait() == STOP


def test_one_rank_judges_and_one_wakes_the_others() -> None:
    store = dist.HashStore()
    assert [notes_of(store, rank).may_judge() for rank in range(4)] == [True, False, False, False]
    notes_of(store, 2).alarm()
    assert [notes_of(store, rank).wait() for rank in range(4)] == [ALARM] * 4


def test_whoever_cannot_ask_judges_alone() -> None:
    assert notes_of(None).may_judge()
