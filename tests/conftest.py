"""Settings and fixtures of the whole suite: the pool of rank processes, and its output in reports of failed tests."""

import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from pool import RankPool

# Rank processes and other children inherit these: one thread each, no network, no windows.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}

# No deadline, since times on a busy machine mean nothing; the same examples in every run, so that a failure comes back.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four rank processes shared by all tests of the run; see pool.py."""
    ranks = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu need one."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add what the ranks wrote to the report of a failed test."""
    report = yield
    ranks = getattr(item, "funcargs", {}).get("pool")
    if report.when == "call" and report.failed and isinstance(ranks, RankPool):
        report.sections.append(("Output of the ranks in the last job", ranks.last_output()))
    return report
