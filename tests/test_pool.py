"""The pool of rank processes: ranks see each other, failures are reported by rank, nothing survives a broken job."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from pool import RankErrors, RankPool, RemoteError


class Answer(NamedTuple):
    """A class of this file: answers and arguments may be of types that only a test file defines."""

    rank: int
    total: float


def sum_of_ranks(offset: Answer) -> Answer:
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()) + offset.total)
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total.item())


def wait_for_a_rank_that_raises() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("broken on purpose")
    dist.all_reduce(torch.ones(1))


def kill_last_rank() -> int:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return 1


def wait_forever_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        threading.Event().wait()
    return "done"


def print_and_raise() -> None:
    print(f"last words of rank {os.environ['RANK']}")
    raise ValueError("no")


def spoil_the_process() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(77)


def state_of_the_process() -> tuple[bool, torch.dtype, bool, bool, torch.Tensor]:
    modes = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return "LEFT_BEHIND" in os.environ, torch.get_default_dtype(), *modes, torch.rand(2)


def process_id() -> int:
    return os.getpid()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def breakable_pool(tmp_path: Path) -> Iterator[RankPool]:
    """A pool that starts quickly, since the tests below break it."""
    ranks = RankPool(2, tmp_path, preload=("torch.distributed",))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_see_each_other(pool: RankPool, world: int) -> None:
    expected = sum(range(world)) + world * 0.5
    assert pool.run(sum_of_ranks, world, Answer(0, 0.5)) == [Answer(rank, expected) for rank in range(world)]


def test_exception_of_one_rank_is_reported_and_releases_the_others(pool: RankPool) -> None:
    with pytest.raises(RankErrors, match="broken on purpose") as failure:
        pool.run(wait_for_a_rank_that_raises, 2)
    assert failure.value.errors[1].type_name == "KeyError"
    assert "wait_for_a_rank_that_raises" in failure.value.errors[1].traceback
    assert failure.value.errors[0].type_name == "RuntimeError"  # gloo: connection closed by peer


def test_killed_rank_is_reported_and_the_pool_works_again(breakable_pool: RankPool) -> None:
    answers = breakable_pool.try_run(kill_last_rank, 2)
    assert all(isinstance(answer, RemoteError) for answer in answers)
    assert answers[1].type_name == "Died"
    assert "exit code -9" in answers[1].message
    assert breakable_pool.run(sum_of_ranks, 2, Answer(0, 0.0)) == [Answer(0, 1.0), Answer(1, 1.0)]


def test_hanging_rank_is_named_with_its_stack_and_killed(breakable_pool: RankPool) -> None:
    before = breakable_pool.run(process_id, 2)
    answers = breakable_pool.try_run(wait_forever_on_rank_1, 2, timeout=1)
    assert answers[0] == "done"
    assert answers[1].type_name == "Hung"
    assert "wait_forever_on_rank_1" in answers[1].traceback
    assert not any(alive(pid) for pid in before)


def test_output_of_the_ranks_is_part_of_the_error(pool: RankPool) -> None:
    with pytest.raises(RankErrors, match="last words of rank 1"):
        pool.run(print_and_raise, 2)


def test_jobs_do_not_see_the_state_of_earlier_jobs(pool: RankPool) -> None:
    before = pool.run(state_of_the_process, 1)[0]
    pool.run(spoil_the_process, 1)
    after = pool.run(state_of_the_process, 1)[0]
    assert after[:4] == before[:4] == (False, torch.float32, True, False)
    assert torch.equal(after[4], before[4])


def test_nested_functions_and_too_large_worlds_are_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="module-level"):
        pool.run(lambda: None, 2)
    with pytest.raises(ValueError, match="pool of 4"):
        pool.run(process_id, 5)
