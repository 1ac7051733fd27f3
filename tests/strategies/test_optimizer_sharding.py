"""Optimizer state divided over the A ranks: the numbers of the plain optimizer, half of its bytes, any checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fits import Run
from pool import RankPool
from sharding_cases import SAVED, Case, Result, close, fit, joined, one, same
from torch import Tensor, nn

from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies.divided import Division, divide_state
from lightning_afd.strategies.refusals import refuse_optimizer

RUN = Run(layout="2A+1F", precision="64-true")
CPU = torch.device("cpu")


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"scheduler": "lambda", "options": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 4}},
    "values": {"scheduler": "one cycle", "options": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}},
    "a step left out": {"scheduler": "plateau", "poison": True, "options": {"gradient_clip_val": 0.1}},
    "a hook of the user": {"scheduler": "sequential", "hook": True, "optimizer": torch.optim.Adagrad},
}


def test_numbers_are_those_of_the_plain_optimizer(pool: RankPool) -> None:
    cases = [Case(sharding=sharding, **options) for options in CASES.values() for sharding in ("none", "torch")]
    ranks = pool.run(fit, RUN.world, RUN, cases, timeout=120)
    for number, name in enumerate(CASES):
        for rank in ranks:
            plain, divided = rank[2 * number : 2 * number + 2]
            assert same(plain.weights, divided.weights), name
            assert plain.rates == divided.rates and plain.names == divided.names, name
        check_shares([rank[2 * number] for rank in ranks], [rank[2 * number + 1] for rank in ranks])


def check_shares(plain: list[Result], divided: list[Result]) -> None:
    """Both A ranks together hold the state of one, half of it each as far as whole parameters allow; F is as it was."""
    assert same(plain[2].state, divided[2].state)
    first, second = divided[0].state, divided[1].state
    assert first.keys().isdisjoint(second) and same(plain[0].state, {**first, **second})
    largest = max(value.numel() for value in plain[0].weights.values())
    tensors = sum(value.numel() for value in plain[0].weights.values())
    kinds = len({key.split("/")[1] for key, value in plain[0].state.items() if value.dim()})
    for part in (first, second):
        numbers = sum(value.numel() for value in part.values() if value.dim())
        assert abs(numbers - kinds * tensors / 2) <= kinds * largest / 2


def _broken(name: str, case: Case) -> list[Result]:
    """A fit with a method of torch's own optimizer, or without it."""
    from lightning_afd.strategies.sharded_optimizer import ShardedOptimizer, ZeroRedundancyOptimizer

    method = ZeroRedundancyOptimizer.step if name == "step" else lambda self: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedOptimizer, name, method)
        return fit(RUN, [case])


def test_without_the_exchange_replicas_go_apart(pool: RankPool) -> None:
    first, second, _ = (rank.weights for rank in one(pool.run(_broken, RUN.world, "_sync_params", Case())))
    assert first.keys() == second.keys() and not any(torch.equal(first[name], second[name]) for name in first)


def test_torchs_own_step_forgets_rates_that_a_hook_sets(pool: RankPool) -> None:
    first, _, plain = one(pool.run(_broken, RUN.world, "step", Case(hook=True)))
    assert first.rates != plain.rates


def test_under_a_loss_scaler(pool: RankPool) -> None:
    run = Run(layout="2A+1F")
    cases = [
        Case(sharding=how, poison=True, scaled=True, options={"gradient_clip_val": 0.1}) for how in ("none", "torch")
    ]
    for plain, divided in pool.run(fit, run.world, run, cases):
        assert same(plain.weights, divided.weights)


def test_checkpoints_go_from_one_sharding_and_layout_to_another(pool: RankPool, tmp_path: Path) -> None:
    paths = {how: tmp_path / f"{how}.ckpt" for how in ("none", "torch")}
    whole = {how: one(pool.run(fit, 3, RUN, [Case(sharding=how, scheduler="lambda")], paths[how])) for how in paths}
    assert whole["torch"][0].rates == whole["none"][0].rates
    other = Run(layout="3A+1F", precision="64-true")
    for run, before, after in [(RUN, "torch", "none"), (RUN, "none", "torch"), (other, "torch", "torch")]:
        case = Case(sharding=after, scheduler="lambda")
        ranks = one(pool.run(fit, run.world, run, [case], None, paths[before]))
        assert all(rank.rates == whole["none"][0].rates[SAVED:] for rank in ranks)
        assert run is not RUN or all(close(a.weights, b.weights) for a, b in zip(ranks, whole["none"], strict=True))
        assert same(joined(ranks, "started", divided=after == "torch"), whole["none"][0].saved)
        assert same(joined(whole["torch"], "saved", divided=True), whole["none"][0].saved)


def _step_mixed(divide: bool) -> tuple[list[Tensor], int]:
    """Three steps of parameters of several dtypes, one of them frozen and one without gradients, on two ranks."""
    if divide:
        dist.init_process_group("gloo")
    draw = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, 3, generator=draw)) for n in range(1, 6)]
    parameters[1].data = parameters[1].data.to(torch.bfloat16)
    parameters[2].requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    if divide:
        groups: Any = SimpleNamespace(replicas=dist.group.WORLD)
        (optimizer,) = divide_state([optimizer], [], Division(sharding="torch", groups=groups, replicas=2))
    for _ in range(3):
        for parameter in parameters[:2] + parameters[3:-1]:
            parameter.grad = parameter.detach() * 0.1 + 1
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters], len(optimizer.state)


def test_parameters_of_several_dtypes(pool: RankPool) -> None:
    expected, count = _step_mixed(divide=False)
    ranks = pool.run(_step_mixed, 2, True)
    assert sum(own for _, own in ranks) == count == 3
    for parameters, _ in ranks:
        assert all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(parameters, expected, strict=True))


class Lookahead:
    """An optimizer around another one, as users write them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_wrapped_optimizers_are_refused() -> None:
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters())
    refuse_optimizer(inner, "afd", "torch", CPU)
    refuse_optimizer(Lookahead(inner), "afd", "none", CPU)
    with pytest.raises(MisconfigurationException, match="state of Lookahead, because it wraps SGD"):
        refuse_optimizer(Lookahead(inner), "afd", "torch", CPU)
