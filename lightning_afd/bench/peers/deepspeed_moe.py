"""DeepSpeed-MoE: its layer in place of each MoE block, expert parallel over all ranks, without dropping tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_afd.bench.job import Job, Step
from lightning_afd.bench.peers.deepspeed_engine import config_of, connect, initialise


class Expert(nn.Module):
    """SwiGLU of three matrices, as the workload's experts."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """DeepSpeed's layer, which also returns a loss and counts, as a block of transformers."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        sizes = job.workload
        self.moe = MoE(
            sizes.hidden,
            Expert(sizes.hidden, sizes.width),
            num_experts=sizes.experts,
            ep_size=job.world,
            k=sizes.top_k,
            drop_tokens=False,
            use_rts=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x)[0]
        return out


def make(job: Job) -> Step:
    """Collective: the workload's attention with DeepSpeed's experts."""
    connect(job)
    model: Any = job.workload.model(job.device)
    with torch.random.fork_rng():
        torch.manual_seed(job.workload.seed)
        for layer in model.model.layers:
            layer.mlp = Block(job).to(job.device)
    return initialise(job, model, config_of(job))
