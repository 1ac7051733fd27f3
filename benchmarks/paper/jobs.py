"""The jobs of DisagMoE's experiments, and sections of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from lightning_afd.baselines.collocated import Collocated, Costs
from lightning_afd.baselines.stages import Stages
from lightning_afd.cost.hardware import Cluster
from lightning_afd.cost.job import BatchShape, Choices, Job, Precision
from lightning_afd.cost.model import ModelShape
from lightning_afd.placement import Layout
from lightning_afd.recipes.shapes import named_cluster, named_model

MODELS = {"DeepSeek-MoE": "deepseek_moe_paper", "GPT-OSS": "gpt_oss_paper", "Qwen3": "qwen3_paper"}
LENGTHS = (4096, 8192, 16384, 32768)
SEQUENCES = 512
MEGATRON = Precision(compute="bfloat16", weight_bytes=2, gradient_bytes=4, optimizer_bytes=12)
"""bf16 weights, float32 gradients, float32 weights and two moments in the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report."""

    title: str
    lines: Sequence[str]

    def text(self) -> str:
        return "\n".join((f"## {self.title}", "", *self.lines, ""))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines] + [""]


@cache
def model_of(name: str) -> ModelShape:
    """A model of the paper's table without its head, which the paper's counts leave out."""
    return replace(named_model(MODELS[name]), vocab=0)


@cache
def cluster_of(efficiency: float = 0.8, memory_gb: float = math.inf) -> Cluster:
    """The paper's 16 nodes of 8 H800, with NICs of some efficiency and, if wanted, a limit of memory."""
    cluster = named_cluster("h800_16x8")
    nic, device = replace(cluster.nic, efficiency=efficiency), replace(cluster.device, memory_gb=memory_gb)
    return replace(cluster, nic=nic, device=device)


def job_of(
    model: ModelShape,
    length: int,
    cluster: Cluster,
    dedup: Literal["rank", "node", "none"] = "node",
    sequences: int = SEQUENCES,
) -> Job:
    """So many sequences per step on the whole cluster, one per rank and micro-batch; the layout stands for them."""
    return Job(
        model=model,
        layout=Layout(attention=8, ffn=8),
        cluster=cluster,
        batch=BatchShape.rows(1, length),
        micro_batches=sequences // 8,
        choices=Choices(precision=MEGATRON, dedup=dedup, shard_optimizer=True),
    )


def with_top_k(model: ModelShape, top_k: int) -> ModelShape:
    """The same model with another number of experts per token."""
    layers = (replace(layer, experts=replace(layer.experts, top_k=top_k)) for layer in model.layers)
    return replace(model, layers=tuple(layers))


def costs_on(job: Job, experts: int) -> Costs:
    """Costs of a collocated layout without pipeline stages, in which so many ranks share the experts."""
    shape = Stages(layers=len(job.model.moe), chunks=1, micro_batches=1)
    return Costs(job=job, layout=Collocated(data=experts, experts=experts), shape=shape)


def shares(job: Job, experts: int) -> tuple[float, float, float]:
    """Shares of a step's time that attention, experts and all-to-all take where nothing is overlapped (0..1)."""
    costs = costs_on(job, experts)
    parts = costs.seconds_of("A"), costs.seconds_of("E"), costs.seconds_of("D", "C")
    return parts[0] / sum(parts), parts[1] / sum(parts), parts[2] / sum(parts)
