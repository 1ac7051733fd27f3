"""One norm of all gradients, whoever holds them; the optimizer of a rank sees only what the rank owns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, plain_step
from tiny import tiny
from torch import nn

from lightning_afd.model.place import is_first_copy, is_owned
from lightning_afd.optimizer import GlobalNorm, clip_by_norm, drop_foreign, measure_norm
from lightning_afd.placement import Layout
from lightning_afd.transport.local import LocalNetwork, LocalTransport


def with_gradients(*gradients: list[float] | None, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros(2 if gradient is None else len(gradient), dtype=dtype)))
        parameters[-1].grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
    return parameters


def on_ranks(layout: Layout, function: Callable[[int, LocalTransport], Any]) -> list[Any]:
    network = LocalNetwork(layout)
    return network.run([partial(function, rank, LocalTransport(network, rank)) for rank in range(layout.world)])


def norm_of(layout: Layout, held: list[list[nn.Parameter]], counting: set[int]) -> GlobalNorm:
    """The norm, which must be the same on all ranks."""
    norms = on_ranks(layout, lambda rank, t: measure_norm(held[rank], t, counts=lambda _: rank in counting))
    assert all(repr(norm) == repr(norms[0]) for norm in norms)  # repr: NaN differs from itself
    return norms[0]


def test_shared_gradients_count_once_and_sharded_ones_everywhere() -> None:
    replica = [3.0, 0.0], None, [4.0]
    held = [with_gradients(*replica), with_gradients(*replica), with_gradients([12.0]), with_gradients([0.0], [84.0])]
    layout = Layout(attention=2, ffn=2)
    assert norm_of(layout, held, {0, 2, 3}) == GlobalNorm(pytest.approx(85.0), None)
    assert norm_of(layout, held, {0, 1, 2, 3}).value == pytest.approx(math.sqrt(85.0**2 + 25))


def test_norm_without_any_gradient_is_zero() -> None:
    assert norm_of(Layout(attention=1, ffn=1), [with_gradients(None), []], {0, 1}) == GlobalNorm(0.0, None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("rank", "number"), [(0, 0), (1, 2), (2, 1)])
def test_culprit_is_the_first_bad_gradient_also_on_a_rank_that_does_not_count(
    bad: float, rank: int, number: int
) -> None:
    held = [with_gradients([1.0, 0.0], None, [2.0, 3.0]) for _ in range(3)]
    held[rank][number].grad = torch.tensor([1.0, bad])
    held[2][2].grad = torch.tensor([bad, 0.0])
    norm = norm_of(Layout(attention=2, ffn=1), held, {0, 2})
    assert norm.culprit == (rank, number)
    assert not math.isfinite(norm.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1.0, 100.0])
def test_clipping_on_one_rank_is_that_of_torch(max_norm: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(7,), (3, 4), (1,)]
    ours = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes] + with_gradients(None, dtype=dtype)
    for parameter, shape in zip(ours, shapes, strict=False):
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    norm = measure_norm(ours, OneRank(), counts=lambda _: True)  # type: ignore[arg-type]
    clip_by_norm(ours, norm.value, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    assert norm.value == pytest.approx(expected.item(), rel=tolerance)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=0)


def test_norm_of_half_precision_does_not_overflow() -> None:
    held = with_gradients([6e4, 0.0], [0.0, 6e4], dtype=torch.float16)
    norm = measure_norm(held, OneRank(), counts=lambda p: True)  # type: ignore[arg-type]
    assert norm == GlobalNorm(pytest.approx(84853, rel=1e-3), None)


def test_norm_of_a_sparse_gradient_sums_equal_rows() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    norm = measure_norm([table.weight], OneRank(), counts=lambda p: True)  # type: ignore[arg-type]
    assert norm.value == pytest.approx(math.sqrt(2 * 2**2 + 2))


class OneRank:
    """Collectives of a job with one rank."""

    def all_gather(self, values: list[float]) -> list[list[float]]:
        return [list(values)]


def test_gradients_below_the_limit_stay_bit_for_bit() -> None:
    parameters = with_gradients([0.1, 0.3])
    before = parameters[0].grad.clone()
    clip_by_norm(parameters, 0.9, 1.0)
    assert torch.equal(parameters[0].grad, before)
    clip_by_norm([], 10.0, 1.0)


def test_norm_of_a_split_model_is_that_of_the_whole_one() -> None:
    whole, batches, layout = tiny(layers=2).double(), make_batches(2, 2), Layout(attention=2, ffn=2)
    job = LocalJob(whole, layout)
    job.step(batches)
    held = [[p for p in model.parameters() if p.device.type != "meta"] for model in job.models]
    _, grads = plain_step(whole, batches)
    expected = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    assert norm_of(layout, held, {0, 2, 3}) == GlobalNorm(pytest.approx(expected, rel=1e-12), None)


def test_norm_counts_shared_experts_of_ffn_ranks_once() -> None:
    whole, batches, layout = tiny(layers=2, shared_expert=True).double(), make_batches(2, 2), Layout(attention=2, ffn=2)
    job = LocalJob(whole, layout, shared_experts="ffn")
    job.step(batches)
    held = [[p for p in model.parameters() if is_owned(p)] for model in job.models]
    grads = plain_step(whole, batches)[1].values()
    expected = torch.stack([grad.norm() for grad in grads]).norm().item()
    norms = on_ranks(
        layout, lambda rank, t: measure_norm(held[rank], t, counts=partial(is_first_copy, layout=layout, rank=rank))
    )
    assert norms == [GlobalNorm(pytest.approx(expected, rel=1e-12), None)] * 4


def test_foreign_parameters_leave_the_groups_and_the_groups_stay() -> None:
    own, foreign = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    groups = [
        {"params": [*own.parameters(), *foreign.parameters()], "lr": 0.5},
        {"params": list(nn.Linear(3, 3, device="meta").parameters()), "lr": 0.25, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for parameter in (*foreign.parameters(), *groups[1]["params"]):
        parameter.afd_foreign = True  # as placing a model marks them
    drop_foreign(optimizer)
    first, second = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(p) for p in own.parameters()]
    assert second["params"] == [] and second["weight_decay"] == 0.1
    own(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def test_state_of_foreign_parameters_goes_too() -> None:
    own, foreign = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    foreign.afd_foreign = True  # type: ignore[attr-defined]
    optimizer = torch.optim.Adagrad([own, foreign])
    drop_foreign(optimizer)
    assert list(optimizer.state) == [own]
