"""Bytes that a composed recipe needs on the fullest rank of each worker group, by the planner's cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_afd.allocate.fit import run_length
from lightning_afd.cost.config import model_shape
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.in_flight import pipelined
from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices, Job, Precision
from lightning_afd.cost.memory import Memory, bounded_activations, memory_of, scheduled_activations
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout, Worker, as_groups
from lightning_afd.recipes.plan import shape_fields
from lightning_afd.schedule.orders import Knobs, build


def job_of(config: DictConfig) -> Job:
    """What `lightning-afd pretrain` would run, as the planner sees it; each row counts as one document."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    strategy, data = settings["strategy"], settings["data"]
    if not isinstance(strategy, dict) or "attention" not in strategy:
        raise PlanError("only strategy=afd has separate ranks whose memory can be told apart")
    fields = shape_fields(settings["model"])
    groups = as_groups(strategy["groups"])
    return Job(
        model=model_shape(fields),
        layout=Layout(attention=strategy["attention"], ffn=strategy["ffn"], groups=groups),
        cluster=Cluster.read(settings["cluster"]),
        batch=BatchShape.rows(-(-data["batch_size"] // strategy["micro_batches"]), data["seq_len"]),
        micro_batches=min(strategy["micro_batches"], data["batch_size"]),
        choices=Choices(
            precision=_precision(str(settings["trainer"]["precision"])),
            recompute=strategy["recompute"],
            recompute_experts=strategy["recompute_experts"],
            shared_experts=strategy["shared_experts"],
            router_logits=groups != 1 and bool(fields.get("output_router_logits")),
            shard_optimizer=strategy["optimizer_sharding"] != "none",
            split_attention=strategy["order"] == "zero-bubble" and strategy["recompute"] == "none",
        ),
    )


def footprints(config: DictConfig) -> Mapping[Worker, Memory]:
    """Memory of each worker group's fullest rank; activations are counted from above, and exactly where that is needed.

    Raises PlanError naming the worker groups for which the devices of `cluster` are too small.
    """
    job = job_of(config)
    limit = job.cluster.device.memory_bytes
    found = {worker: memory_of(job, worker, _bound(job, worker, config)) for worker in job.shape.workers()}
    if any(memory.total > limit for memory in found.values()):
        found = _exactly(job, config)
    full = {str(worker): memory.total for worker, memory in found.items() if memory.total > limit}
    if full:
        needs = ", ".join(f"{worker} {total / 1e9:.1f} GB" for worker, total in full.items())
        raise PlanError(
            f"of the {limit / 1e9:.1f} GB that a {job.cluster.device.name} has for a job, ranks need more: {needs}; "
            "use more ranks, recompute, fewer micro-batches or a shorter data.seq_len"
        )
    return found


def _bound(job: Job, worker: Worker, config: DictConfig) -> float:
    """Of activations, from the forwards in flight of af-pipe and what zero-bubble puts off."""
    strategy, workers = config.strategy, 2 * job.layout.depth
    longest = 2 * workers if strategy.micro_batch_group == "auto" else strategy.micro_batch_group
    held = pipelined(
        job.shape, 2 * worker.group + (worker.role == "F"), run_length(workers, job.micro_batches, longest)
    )
    if strategy.order == "zero-bubble" and (worker.role == "F" or job.choices.split_attention):
        held += strategy.pending_weight_gradients
    return bounded_activations(job, worker, held)


def _exactly(job: Job, config: DictConfig) -> Mapping[Worker, Memory]:
    strategy = config.strategy
    knobs = Knobs(group=strategy.micro_batch_group, pending=strategy.pending_weight_gradients)
    shape = replace(job.shape, split_attention=job.choices.split_attention)
    programs = build(strategy.order, shape, knobs).programs
    return {worker: memory_of(job, worker, scheduled_activations(job, worker, programs[worker])) for worker in programs}


def _precision(name: str) -> Precision:
    known = name if name in PRECISIONS else name.removesuffix("-true")
    if known not in PRECISIONS:
        raise PlanError(f"trainer.precision={name} is not known to the planner: {', '.join(PRECISIONS)}")
    return PRECISIONS[known]
