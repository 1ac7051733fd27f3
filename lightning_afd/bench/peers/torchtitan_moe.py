"""torchtitan's MoE layer in place of each MoE block: its router, all-to-all and experts, which multiply in bfloat16.

The sum of dense gradients is ours, as torchtitan leaves it to FSDP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_afd.bench.job import Job, Step
from lightning_afd.bench.peers.data_parallel import DataParallelStep
from lightning_afd.errors import PlanError


def make(job: Job) -> Step:
    """Collective: the workload's attention and weights with torchtitan's experts."""
    from torchtitan.distributed.utils import set_spmd_backend

    if job.workload.width % 8:
        raise PlanError(
            f"torchtitan-moe multiplies in bfloat16, in rows of whole 16 bytes, which experts {job.workload.width} "
            f"wide do not have: choose workload.width={8 * round(job.workload.width / 8)}, or leave it out"
        )
    set_spmd_backend("default")
    mesh = init_device_mesh(job.device.type, (job.world,), mesh_dim_names=("ep",))
    model: Any = job.workload.model(job.device)
    for layer in model.model.layers:
        layer.mlp = block(job, layer.mlp, mesh)
    experts = {id(p) for name, p in model.named_parameters() if ".inner_experts." in name}
    optimizer = job.workload.make_optimizer(list(model.parameters()))

    def backward(loss: Tensor) -> None:
        loss.backward()
        average(model, experts, job.world)

    def advance() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return DataParallelStep(job, model, backward, advance)


def average(model: nn.Module, experts: set[int], world: int) -> None:
    """Collective: experts have seen the tokens of all ranks, all else only those of this one."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in experts]
    flat = torch.cat([gradient.reshape(-1) for gradient in dense])
    dist.all_reduce(flat)
    for gradient, part in zip(dense, flat.split([g.numel() for g in dense]), strict=True):
        gradient.copy_(part.view_as(gradient))
    torch._foreach_div_(gradients, world)


def block(job: Job, theirs: Any, mesh: DeviceMesh) -> nn.Module:
    """torchtitan's layer with the weights of a block of transformers, of whose experts this rank gets its share."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    sizes = job.workload
    local = sizes.experts // job.world
    layer: Any = MoE.Config(
        num_experts=sizes.experts,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=sizes.hidden, hidden_dim=sizes.width, num_experts=local),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=sizes.experts, top_k=sizes.top_k),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=sizes.experts,
            gate=Linear.Config(in_features=sizes.hidden, out_features=sizes.experts, bias=False),
            top_k=sizes.top_k,
            score_func="softmax",
            route_norm=True,
        ),
        load_balance_coeff=None,
    ).build()
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    mine = slice(job.rank * local, (job.rank + 1) * local)
    inner = layer.routed_experts.inner_experts
    with torch.no_grad():
        gate, up = theirs.experts.gate_up_proj[mine].chunk(2, dim=1)
        inner.w1_EFD.copy_(gate)
        inner.w3_EFD.copy_(up)
        inner.w2_EDF.copy_(theirs.experts.down_proj[mine])
        layer.router.gate.weight.copy_(theirs.gate.weight)
    return layer.to(job.device)
