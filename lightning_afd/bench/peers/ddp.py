"""DistributedDataParallel: what Lightning's strategy "ddp" does. Every rank holds all experts; no token travels."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from lightning_afd.bench.job import Job, Step
from lightning_afd.bench.peers.data_parallel import with_own_optimizer


def make(job: Job) -> Step:
    """Collective: the workload's model, replicated."""
    return with_own_optimizer(job, DistributedDataParallel(job.workload.model(job.device)))
