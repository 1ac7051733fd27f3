"""Divided optimizer state with two F ranks, the head there, and several groups: the plain optimizer's numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import weights
from fits import Run, State, tiny_module
from pool import RankPool
from torch import Tensor, nn

from lightning_afd.strategies.divided import Division, divide_state

RUN = Run(layout="2A+2F", precision="64-true")


def both(run: Run, options: dict[str, Any]) -> list[tuple[State, int]]:
    """Weights of this rank and how many numbers of state it keeps, with the plain and the divided optimizer."""
    made = []
    for sharding in ("none", "torch"):
        module = tiny_module(steps=3, layers=2)
        module.optimizer = torch.optim.AdamW
        trainer = run.trainer({**options, "optimizer_sharding": sharding}, gradient_clip_val=0.1)
        trainer.fit(module)
        kept = [value.numel() for state in trainer.optimizers[0].state.values() for value in state.values()]
        made.append((weights(module), sum(kept)))
    return made


def check(ranks: list[list[tuple[State, int]]], replicas: list[tuple[int, int]]) -> None:
    """Bit-equal weights; each pair of replicas keeps the state of one, all other ranks all of theirs."""
    for (plain, _), (divided, _) in ranks:
        assert plain.keys() == divided.keys() and all(torch.equal(plain[name], divided[name]) for name in plain)
    kept = [(plain[1], divided[1]) for plain, divided in ranks]
    for one, other in replicas:
        assert 0 < kept[one][1] < kept[one][0] and kept[other][1] > 0
        assert kept[one][1] + kept[other][1] == kept[one][0]
    alone = [rank for rank in range(len(ranks)) if rank not in sum(replicas, ())]
    assert all(kept[rank][0] == kept[rank][1] for rank in alone)


@pytest.mark.parametrize("options", [{}, {"head": "ffn"}])
def test_numbers_are_those_of_the_plain_optimizer(pool: RankPool, options: dict[str, Any]) -> None:
    check(pool.run(both, 4, RUN, options), [(0, 1)])


def _steps_of_group(divide: bool, group: int) -> tuple[list[Tensor], int]:
    """Three steps of one of two groups, which have parameters of their own."""
    replicas = None
    if divide:
        dist.init_process_group("gloo")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = dist.get_rank() // 2
        replicas = pairs[group]
    draw = torch.Generator().manual_seed(group)
    parameters = [nn.Parameter(torch.randn(n + group, 3, generator=draw)) for n in range(1, 5)]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters)
    if divide:
        groups: Any = SimpleNamespace(replicas=replicas)
        (optimizer,) = divide_state([optimizer], [], Division(sharding="torch", groups=groups, replicas=2))
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.1 + 1
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters], len(optimizer.state)


def test_each_group_divides_its_own_state(pool: RankPool) -> None:
    """Several groups have replicas whose ranks do not begin at 0."""
    ranks = pool.run(_steps_of_group, 4, True, 0)
    for group in range(2):
        expected, count = _steps_of_group(False, group)
        pair = ranks[2 * group : 2 * group + 2]
        assert sum(own for _, own in pair) == count and all(own for _, own in pair)
        assert all(torch.equal(p, q) for parameters, _ in pair for p, q in zip(parameters, expected, strict=True))
