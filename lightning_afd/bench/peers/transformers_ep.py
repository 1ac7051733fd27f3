"""Expert parallelism of transformers itself: FSDP2 around the model, an all-to-all around its experts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lightning_afd.bench.job import Job, Step
from lightning_afd.bench.peers.data_parallel import with_own_optimizer


def make(job: Job) -> Step:
    """Collective: the workload's model from a folder, which is the way that leads to it."""
    return with_own_optimizer(job, distributed_model(job).train(), fused=False)


def distributed_model(job: Job) -> nn.Module:
    """Each rank loads its own part."""
    config = DistributedConfig(fsdp_size=job.world, ep_size=job.world, ep_implementation="all_to_all")
    with tempfile.TemporaryDirectory() as folder:
        if job.rank == 0:
            job.workload.model(job.device).save_pretrained(folder)
        shared = Path(job.gather(folder)[0])
        model = AutoModelForCausalLM.from_pretrained(shared, distributed_config=config)
        job.gather(None)
    assert isinstance(model, nn.Module)
    return model
