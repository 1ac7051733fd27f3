"""Gradients that a pipelined step makes ahead reach `grad` when Lightning's backward asks for them, and not before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_afd import gradients
from lightning_afd.errors import PlanError
from lightning_afd.gradients import BUCKET_BYTES, GradientStash, buckets, installing_loss, sum_over_replicas
from lightning_afd.placement import Layout
from lightning_afd.transport.local import LocalNetwork, LocalTransport


def parameters_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def training_step(parameters: list[nn.Parameter], stash: GradientStash, value: float) -> Tensor:
    """A step whose pipeline gives each parameter the gradient `value` (twice a half), and a loss of the same value."""
    stash.begin()
    assert all(parameter.grad is None for parameter in parameters)
    for _ in range(2):
        for parameter in parameters:
            torch.autograd.backward([parameter.sum()], [torch.tensor(value / 2)])
    stash.end()
    return installing_loss(torch.tensor(value), stash.install)


def values(parameters: list[nn.Parameter]) -> list[float | None]:
    return [None if p.grad is None else p.grad.unique().item() for p in parameters]


def test_lightnings_order_of_step_zero_grad_and_backward() -> None:
    parameters = parameters_of((3,), (2, 2))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    stash = GradientStash(parameters)
    for value in (2.0, 5.0):
        before = values(parameters)
        loss = training_step(parameters, stash, value)
        assert values(parameters) == before  # those of the last step, until zero_grad
        optimizer.zero_grad()
        assert values(parameters) == [None, None]
        loss.backward()
        assert values(parameters) == [value, value]
        optimizer.step()
    assert parameters[0].unique().item() == -7.0


def test_accumulation_over_a_window_scales_each_loss() -> None:
    parameters = parameters_of((3,))
    stash = GradientStash(parameters)
    for number, value in enumerate((2.0, 6.0, 10.0), start=1):
        (training_step(parameters, stash, value) / 2).backward()
        assert values(parameters) == [sum((2.0, 6.0, 10.0)[:number]) / 2]


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**16])
def test_gradient_of_the_loss_scales_all_gradients(scale: float) -> None:
    parameters = parameters_of((2,), (3,))
    loss = training_step(parameters, GradientStash(parameters), 2.0)
    (loss * scale).backward()
    assert values(parameters) == [2.0 * scale] * 2


def test_gradients_are_moved_where_there_are_none_and_added_in_place_where_there_are() -> None:
    (parameter,) = parameters_of((4,))
    stash = GradientStash([parameter])
    stash.begin()
    made = torch.ones(4)
    parameter.grad = made
    stash.end()
    assert parameter.grad is None
    stash.install(torch.ones(()))
    assert parameter.grad is made
    training_step([parameter], stash, 3.0).backward()
    assert parameter.grad is made and values([parameter]) == [4.0]


def test_parameter_without_gradient_keeps_what_it_has() -> None:
    used, unused, earlier = parameters_of((2,), (2,), (2,))
    earlier.grad = torch.full((2,), 9.0)
    stash = GradientStash([used, unused, earlier])
    stash.begin()
    used.grad = torch.ones(2)
    stash.end()
    stash.install(torch.tensor(3.0))
    assert values([used, unused, earlier]) == [3.0, None, 9.0]


def test_loss_keeps_its_value_and_installs_once_per_backward() -> None:
    calls: list[float] = []
    loss = installing_loss(torch.tensor(1.5, dtype=torch.float64), lambda scale: calls.append(scale.item()))
    assert loss.item() == 1.5 and loss.dtype == torch.float64 and loss.requires_grad
    assert calls == []
    (loss / 4).backward()
    assert calls == [0.25]


def test_second_backward_is_refused() -> None:
    parameters = parameters_of((2,))
    loss = training_step(parameters, GradientStash(parameters), 2.0)
    loss.backward(retain_graph=True)
    with pytest.raises(PlanError, match="backward ran twice"):
        loss.backward()
    assert values(parameters) == [2.0]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([torch.float32, torch.float64])), max_size=12),
    limit=st.integers(1, 200),
)
def test_buckets_hold_all_tensors_in_order_within_the_limit(sizes: list[Any], limit: int) -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    found = list(buckets(tensors, limit))
    assert [id(t) for bucket in found for t in bucket] == [id(t) for t in tensors]
    for bucket in found:
        assert len({t.dtype for t in bucket}) == 1
        assert len(bucket) == 1 or sum(t.nbytes for t in bucket) <= limit
    for left, right in pairwise(found):  # no bucket could have been larger
        joined = sum(t.nbytes for t in left) + right[0].nbytes
        assert joined > limit or left[0].dtype != right[0].dtype


def on_replicas(replicas: int, function: Callable[[int, LocalTransport], Any]) -> list[Any]:
    layout = Layout(attention=replicas, ffn=1)
    network = LocalNetwork(layout)
    return network.run([partial(function, rank, LocalTransport(network, rank)) for rank in range(replicas)])


@pytest.mark.parametrize("limit", [1, 50, BUCKET_BYTES])
def test_gradients_are_summed_over_replicas(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(gradients, "buckets", partial(buckets, limit=limit))

    def play(rank: int, transport: LocalTransport) -> list[Tensor]:
        parameters = parameters_of((3,), (2, 2), (5,))
        parameters[1] = nn.Parameter(torch.zeros(4, 6).double().t())  # not contiguous, another dtype
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 10.0**rank * (number + 1))
            parameter.grad[(0,) * parameter.dim()] += rank
        sum_over_replicas(parameters, transport)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    for grads in on_replicas(3, play):
        for number, grad in enumerate(grads):
            expected = torch.full_like(grad, 111.0 * (number + 1))
            expected[(0,) * expected.dim()] += 3
            assert torch.equal(grad, expected)


def test_parameter_counts_as_zero_where_it_was_not_used_and_keeps_none_where_nobody_used_it() -> None:
    def play(rank: int, transport: LocalTransport) -> list[float | None]:
        parameters = parameters_of((2,), (2,), (2,), (2,))
        parameters[3].requires_grad_(False)
        parameters[0].grad = torch.ones(2)
        if rank == 1:
            parameters[1].grad = torch.full((2,), 5.0)
        sum_over_replicas(parameters, transport)
        return values(parameters)

    assert on_replicas(2, play) == [[2.0, 5.0, None, None]] * 2


def test_nothing_to_sum_needs_no_collective() -> None:
    (frozen,) = parameters_of((2,))
    frozen.requires_grad_(False)
    sum_over_replicas([frozen], None)  # type: ignore[arg-type]
    sum_over_replicas([], None)  # type: ignore[arg-type]
