"""What contenders of DeepSpeed share: its engine around a model, ZeRO-1, with nothing done silently."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_afd.bench.job import Job, Step
from lightning_afd.bench.peers.data_parallel import DataParallelStep


def config_of(job: Job) -> dict[str, Any]:
    """As a user would write it; clipping is off in all contenders, and DeepSpeed's default would clip at 1.0."""
    return {
        "train_micro_batch_size_per_gpu": job.workload.sequences // job.world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def initialise(job: Job, model: nn.Module, config: dict[str, Any]) -> Step:
    """Collective: the engine around a model and the workload's optimizer, whose experts are a group of their own."""
    import deepspeed
    from deepspeed.moe.utils import configure_moe_param_groups

    def optimizer(parameters: Any) -> Any:
        return job.workload.make_optimizer(configure_moe_param_groups(list(parameters)))

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return DataParallelStep(job, engine, engine.backward, engine.step)


def connect(job: Job) -> None:
    """Tell DeepSpeed that the processes are connected already."""
    import deepspeed

    deepspeed.init_distributed("nccl" if job.device.type == "cuda" else "gloo", verbose=False)
