"""DeepSpeed's AutoEP: expert parallelism put into the workload's transformers model by DeepSpeed itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from transformers.utils import output_capturing

from lightning_afd.bench.job import Job, Step
from lightning_afd.bench.peers.deepspeed_engine import config_of, connect, initialise


def make(job: Job) -> Step:
    """Collective: the workload's model, changed in place."""
    connect(job)
    model = job.workload.model(job.device)
    parallel = {"enabled": True, "autoep_size": job.world, "preset_model": "qwen3_moe", "use_grouped_mm": True}
    with _registry_with_defaults():
        return initialise(job, model, config_of(job) | {"expert_parallel": parallel})


@contextmanager
def _registry_with_defaults() -> Iterator[None]:
    """DeepSpeed 0.19.8 asks a registry of transformers, by name and with a default, which 5.24 does not take."""
    registry = type(output_capturing._CAN_RECORD_REGISTRY)
    get = registry.get

    def get_or(self: Any, key: Any, *default: Any) -> Any:
        return dict.get(self, key, *default) if default else get(self, key)

    with mock.patch.object(registry, "get", get_or):
        yield
