"""Random calls of an experts module, run unsharded under autograd and by shards, and their comparison."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.experts_module import shard_experts


@dataclass
class Result:
    """Output, input gradient, routing gradient and parameter gradients (name to [E, ...]) of one step."""

    y: Tensor
    dx: Tensor
    dw: Tensor
    gradients: dict[str, Tensor]


@dataclass
class Case:
    """The input of a call, with global expert ids, and the gradient of its output."""

    x: Tensor
    idx: Tensor
    w: Tensor
    dy: Tensor


def make_case(module: nn.Module, tokens: int, k: int, pool: Sequence[int], dtype: torch.dtype) -> Case:
    """Random tokens that choose k different experts of the pool."""
    generator = torch.Generator().manual_seed(tokens + k)
    hidden = module.down_proj.shape[1] if not module.is_transposed else module.down_proj.shape[2]
    x, dy = (torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    order = torch.rand(tokens, len(pool), generator=generator).argsort(1)[:, :k]
    w = torch.rand(tokens, k, generator=generator, dtype=torch.float64).to(dtype)
    return Case(x, torch.tensor(pool)[order], w, dy)


def eager(module: nn.Module, case: Case) -> Result:
    """The unsharded module under autograd."""
    module = copy.deepcopy(module)
    x, w = case.x.clone().requires_grad_(), case.w.clone().requires_grad_()
    y = module(x, case.idx, w)
    if y.requires_grad:
        y.backward(case.dy)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    grads = {n: zeros[n] if p.grad is None else p.grad for n, p in module.named_parameters()}
    return Result(y.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (x, w)), grads)


def local_ids(idx: Tensor, owned: Sequence[int]) -> Tensor:
    """Global expert ids to positions in `owned`, -1 elsewhere."""
    table = torch.full((64,), -1, device=idx.device)
    table[torch.tensor(owned, dtype=torch.long, device=idx.device)] = torch.arange(len(owned), device=idx.device)
    return table[idx]


def make_shard(module: nn.Module, owned: Sequence[int], grouped: bool | None = None) -> tuple[nn.Module, ExpertShard]:
    """A copy of the module with only the owned experts, and its shard."""
    part = copy.deepcopy(module)
    shard_experts(part, owned)
    return part, ExpertShard(part, grouped=grouped)


def sharded(module: nn.Module, split: Sequence[Sequence[int]], case: Case, grouped: bool | None = None) -> Result:
    """The sum over shards of outputs and gradients, with the parameters' gradients put back in global order."""
    total = Result(torch.zeros_like(case.x), torch.zeros_like(case.x), torch.zeros_like(case.w), {})
    total.gradients = {name: torch.full_like(p, torch.nan) for name, p in module.named_parameters()}
    for owned in split:
        part, shard = make_shard(module, owned, grouped)
        idx = local_ids(case.idx, owned)
        y, saved = shard.forward(case.x, idx.int(), case.w)
        dx, dw, pending = shard.backward(saved, case.dy)
        shard.weight_gradient(pending)
        assert (dw[idx < 0] == 0).all()
        assert (y.dtype, dx.dtype, dw.dtype) == (case.x.dtype, case.x.dtype, case.w.dtype)
        total.y, total.dx, total.dw = total.y + y, total.dx + dx, total.dw + dw
        for name, parameter in part.named_parameters():
            total.gradients[name][list(owned)] = parameter.grad
    return total


def errors(found: Result, wanted: Result) -> dict[str, float]:
    """Largest difference of each part relative to its largest wanted value (absolute where that is 0)."""
    pairs = {"y": (found.y, wanted.y), "dx": (found.dx, wanted.dx), "dw": (found.dw, wanted.dw)}
    pairs |= {name: (found.gradients[name], wanted.gradients[name]) for name in wanted.gradients}
    ratios = {}
    for name, (a, b) in pairs.items():
        scale = b.abs().max().item() if b.numel() else 0.0
        ratios[name] = ((a.double() - b.double()).abs().max().item() if b.numel() else 0.0) / (scale or 1.0)
    return ratios


def assert_equal(found: Result, wanted: Result, tolerance: float) -> None:
    """Every part agrees; NaN counts as different."""
    ratios = errors(found, wanted)
    assert all(ratio <= tolerance for ratio in ratios.values()), ratios
