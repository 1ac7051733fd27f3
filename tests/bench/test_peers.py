"""Other systems train the same model on the same tokens: their losses are ours, where they take the same weights."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from pool import RankPool

from lightning_afd.bench.compare import Comparison, Effort
from lightning_afd.bench.job import Arena, Job, Step
from lightning_afd.bench.peers.data_parallel import with_own_optimizer
from lightning_afd.bench.registry import PEERS, Contender, resolve
from lightning_afd.bench.result import SAME_LOSS, Section
from lightning_afd.bench.workload import Workload

TINY = Workload(
    layers=4, hidden=16, heads=2, experts=4, top_k=2, width=8, vocabulary=32, seq_len=8, sequences=8, lr=0.5
)
INSTALLED = [name for name, peer in PEERS.items() if not peer.contender(name).missing()]


def compared(contenders: list[Contender]) -> Section:
    torch.set_num_threads(1)
    job = Job.open(Arena(workload=TINY, micro_batches=4, device="cpu"))
    section = Comparison(job, contenders).section("tiny", Effort(repetitions=1))
    job.close()
    return section


def alone(job: Job) -> Step:
    """Each rank trains by itself."""
    return with_own_optimizer(job, job.workload.model(job.device))


def test_what_comes_with_torch_agrees(pool: RankPool) -> None:
    names = ["ddp", "pipeline-1f1b", "pipeline-dualpipe-v"]
    section = pool.run(compared, 2, [resolve(name) for name in ("ep", *names)])[0]
    assert [one.name for one in section.measured] == ["ep", *names]
    assert section.disagreement < SAME_LOSS


def test_ranks_that_average_nothing_are_found(pool: RankPool) -> None:
    control = Contender(name="alone", make=alone)
    section = pool.run(compared, 2, [resolve("ep"), control])[0]
    assert section.disagreement > 10 * SAME_LOSS


@pytest.mark.parametrize("name", PEERS)
def test_each_peer_is_there(name: str) -> None:
    """Modules are found without what they need; a wrong name would show only where it is installed."""
    peer = PEERS[name]
    if name in INSTALLED:
        assert callable(getattr(importlib.import_module(peer.module), peer.function))
    else:
        assert importlib.util.find_spec(peer.module) is not None
