"""torch.distributed.pipelining: layers divided over ranks, 1F1B or DualPipeV; no token travels, whole layers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_afd.bench.job import Job, Step


class Layers(nn.Module):
    """A run of a causal language model's decoder layers, with its embedding or its head at the ends."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        super().__init__()
        inner = model.model
        self.layers = nn.ModuleList(inner.layers[index] for index in layers)
        self.rotary = inner.rotary_emb
        self.embedding = inner.embed_tokens if 0 in layers else None
        is_last = len(inner.layers) - 1 in layers
        self.head = nn.Sequential(inner.norm, model.lm_head) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Ids [b, S] or hidden states [b, S, H] to hidden states or logits [b, S, V]."""
        h_BSH = x if self.embedding is None else self.embedding(x)
        places_1S = torch.arange(h_BSH.shape[1], device=h_BSH.device)[None]
        rotations = self.rotary(h_BSH, position_ids=places_1S)
        for layer in self.layers:
            h_BSH = layer(h_BSH, attention_mask=None, position_ids=places_1S, position_embeddings=rotations)
        return h_BSH if self.head is None else self.head(h_BSH)


class PipelineStep:
    """Calling it makes one step."""

    def __init__(self, job: Job, schedule_name: str, stages: Sequence[int], of: int) -> None:
        """`stages` of this rank, of so many in all."""
        self._job = job
        model = job.workload.model(job.device)
        layers = torch.arange(job.workload.layers).tensor_split(of)
        modules = [Layers(model, layers[index].tolist()) for index in stages]
        self._pipeline = [
            PipelineStage(module, index, of, job.device) for module, index in zip(modules, stages, strict=True)
        ]
        count = max(of, min(job.arena.micro_batches, job.workload.sequences))
        kind = get_schedule_class(schedule_name)
        several = len(stages) > 1
        self._schedule = kind(self._pipeline if several else self._pipeline[0], count, loss_fn=self._loss)  # type: ignore[operator]
        self._first, self._last = 0 in stages, of - 1 in stages
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._optimizer = job.workload.make_optimizer(self._parameters)
        self._number = 0

    def __call__(self) -> float:
        ids_BS = self._job.rows(self._number, 0, 1)
        self._number += 1
        losses: list[Tensor] = []
        arguments = (ids_BS,) if self._first else ()
        if self._last:
            self._schedule.step(*arguments, target=ids_BS, losses=losses)
        else:
            self._schedule.step(*arguments)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else 0.0

    @staticmethod
    def _loss(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())


def make_1f1b(job: Job) -> Step:
    """One stage per rank."""
    return PipelineStep(job, "1F1B", [dist.get_rank()], job.world)


def make_dualpipe_v(job: Job) -> Step:
    """Two stages per rank, first and last ones together."""
    return PipelineStep(job, "DualPipeV", [job.rank, 2 * job.world - 1 - job.rank], 2 * job.world)
