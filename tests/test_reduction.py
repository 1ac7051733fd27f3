"""Gradients summed in chunks on the way: those of the plain loop for any S_p, and the same on all replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_job import LocalJob, labels, make_batches, plain_step
from test_engine import EVERYTHING, TOLERANCE, model_of
from torch import Tensor, nn

from lightning_afd import engine
from lightning_afd.errors import PlanError, ProtocolError
from lightning_afd.model.place import segments_of_dense
from lightning_afd.placement import Layout
from lightning_afd.reduction import MOST_CHUNKS, ChunkedSum, Piece, StepGradients, cut
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.together import TOGETHER_ORDERS
from lightning_afd.transport.local import LocalNetwork, LocalTransport

ONE_BYTE, HUGE = 1, 2**40


# -- where the row is cut ---------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.float64])), max_size=8),
    chunk_bytes=st.integers(1, 300),
)
def test_chunks_are_equal_parts_of_the_row(sizes: list[tuple[int, torch.dtype]], chunk_bytes: int) -> None:
    parameters = [torch.empty(size, dtype=dtype) for size, dtype in sizes]
    chunks = cut(parameters, chunk_bytes)
    numbers = [(p.parameter, i) for chunk in chunks for p in chunk for i in range(p.start, p.stop)]
    assert numbers == [(number, i) for number, p in enumerate(parameters) for i in range(p.numel())]
    for place, chunk in enumerate(chunks):
        (dtype,) = {parameters[piece.parameter].dtype for piece in chunk}
        size = sum(piece.stop - piece.start for piece in chunk)
        most = -(-chunk_bytes // dtype.itemsize)
        ends = place == len(chunks) - 1 or parameters[chunks[place + 1][0].parameter].dtype != dtype
        assert 0 < size <= most if ends else size == most


def test_one_byte_is_one_number_but_no_more_chunks_than_a_step_can_bear() -> None:
    assert cut([torch.empty(3), torch.empty(1)], ONE_BYTE) == [
        (Piece(0, 0, 1),),
        (Piece(0, 1, 2),),
        (Piece(0, 2, 3),),
        (Piece(1, 0, 1),),
    ]
    assert len(cut([torch.empty(10**6, device="meta")], ONE_BYTE)) == pytest.approx(MOST_CHUNKS, rel=0.01)
    assert cut([torch.empty(3), torch.empty(1)], HUGE) == [(Piece(0, 0, 3), Piece(1, 0, 1))]
    assert cut([], ONE_BYTE) == []


# -- steps of the engine ----------------------------------------------------------------------------------------------


def check_steps(job: LocalJob, model: nn.Module, batches: list[list[Tensor]], sizes: tuple[int, ...]) -> None:
    want = plain_step(model, batches)
    for chunk_bytes in sizes:
        job.sum_in_chunks(chunk_bytes)
        outcome = job.step(batches)
        assert outcome.difference(*want) < TOLERANCE
        for other in outcome.replicas[1:]:
            assert all(torch.equal(grad, other[name]) for name, grad in outcome.replicas[0].items())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("attention", "ffn", "groups"), [(2, 2, 1), (3, 1, 1), (2, 1, 2)])
def test_step_equals_the_plain_loop(attention: int, ffn: int, groups: int, order: str) -> None:
    model, layout = model_of(), Layout(attention=attention, ffn=ffn, groups=groups)
    check_steps(LocalJob(model, layout, order), model, make_batches(attention, 3), (ONE_BYTE, 1000, HUGE))


@pytest.mark.parametrize("order", TOGETHER_ORDERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_step_of_ranks_with_both_roles_equals_the_plain_loop(ranks: int, order: str) -> None:
    model = model_of()
    check_steps(LocalJob(model, Layout.together(ranks), order), model, make_batches(ranks, 3), (ONE_BYTE, 1000, HUGE))


@pytest.mark.parametrize("layout", [Layout(attention=2, ffn=2), Layout(attention=2, ffn=2, groups=2)])
def test_tied_weights_dense_layers_and_ranks_short_of_rows(layout: Layout) -> None:
    """The second replica has one micro-batch, whose labels are all masked, of three."""
    model = model_of(**EVERYTHING, dense=(1,))
    full, short = make_batches(2, 3)
    batches = [full, [short[0][:, :1]]]
    assert labels(batches[1][0]) == 0
    check_steps(LocalJob(model, layout), model, batches, (ONE_BYTE, 500, HUGE))


def test_heads_on_f_ranks_are_summed_behind_the_step() -> None:
    model, layout = model_of(), Layout(attention=2, ffn=2, head="ffn")
    check_steps(LocalJob(model, layout), model, make_batches(2, 3), (ONE_BYTE, 1000, HUGE))


@pytest.mark.parametrize("order", ["layer-major", "af-pipe", "zero-bubble", "experts-only", "flowmoe"])
def test_chunks_start_before_the_last_backward_one_at_a_time(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    job = LocalJob(model_of(), Layout.together(2) if order in TOGETHER_ORDERS else Layout(attention=2, ffn=2), order)
    places: list[Action | None] = []
    start = LocalTransport.start_sum_over_replicas

    def noted(transport: LocalTransport, tensor: Tensor) -> Any:
        if transport._rank == 0:
            places.append(job.engines[0].runtime.current[0])
        return start(transport, tensor)

    monkeypatch.setattr(LocalTransport, "start_sum_over_replicas", noted)
    job.sum_in_chunks(500)
    job.step(make_batches(2, 4))
    during = [place for place in places if place is not None]
    runtime = job.engines[0].runtime
    (last, *_) = (span.start for span in reversed(runtime.spans) if (span.action.op, span.action.phase) == ("A", "b"))
    chunks = runtime.reduces
    assert chunks[0].start < chunks[0].end < last and chunks[0].nbytes == 504  # whole numbers of 8 bytes
    assert all(first.end <= second.start for first, second in pairwise(chunks[: len(during)]))
    assert len(set(during)) == len(during) >= 3 and len(places) > len(during)
    assert {span.action.op for span in runtime.spans} == set("ADCE" if job.layout.collocated else "ADC")
    assert all(engine.is_attention or engine.runtime.reduces == [] for engine in job.engines)


def test_gradients_that_come_after_their_segment_was_complete_are_summed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all parameters belonged to the tail: most gradients are late then."""
    model, layout = model_of(), Layout(attention=2, ffn=1)
    monkeypatch.setattr(
        engine, "segments_of_dense", lambda root, decoder: dict.fromkeys(segments_of_dense(root, decoder), 2)
    )
    check_steps(LocalJob(model, layout), model, make_batches(2, 3), (ONE_BYTE, 1000, HUGE))


@pytest.mark.parametrize("broken", ["skipped", "not put back", "late ones forgotten"])
def test_comparison_sees_chunks_that_are_lost(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    model, batches = model_of(), make_batches(2, 3)
    if broken == "skipped":
        start = ChunkedSum._start

        def skipping(sums: ChunkedSum) -> int:
            sums._started += sums._started == 3
            return start(sums)

        monkeypatch.setattr(ChunkedSum, "_start", skipping)
    elif broken == "not put back":
        monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: None)
    else:
        monkeypatch.setattr(engine, "segments_of_dense", lambda r, d: dict.fromkeys(segments_of_dense(r, d), 2))
        monkeypatch.setattr(ChunkedSum, "_late_parts", lambda sums, late: [])
    job = LocalJob(model, Layout(attention=2, ffn=1))
    job.sum_in_chunks(1000)
    assert job.step(batches).difference(*plain_step(model, batches)) > 1e-3


def test_ranks_that_cut_differently_are_found_out() -> None:
    job = LocalJob(model_of(), Layout(attention=2, ffn=1))
    job.sum_in_chunks(1000)
    sums = job.engines[1].sums
    assert sums is not None
    sums.chunk_bytes = 900
    with pytest.raises(ProtocolError, match="sum tensors of different sizes"):
        job.step(make_batches(2, 3))


# -- what a step leaves in grad ---------------------------------------------------------------------------------------

Batch = tuple[list[float | None], float]
"""Gradients of one batch (None: unused), and the factor of its loss."""


def on_two_replicas(play: Callable[[int, LocalTransport], Any]) -> list[Any]:
    network = LocalNetwork(Layout(attention=2, ffn=1))
    return network.run([partial(play, rank, LocalTransport(network, rank)) for rank in range(2)])


def windows(chunk_bytes: int | None, *each: list[list[Batch]], frozen: bool = False) -> list[list[list[float | None]]]:
    """Train windows of batches on two replicas (`each` is one's); what `grad` holds at the end of each window."""

    def play(rank: int, transport: LocalTransport) -> list[list[float | None]]:
        parameters = [nn.Parameter(torch.zeros(2, 3).t()), *(nn.Parameter(torch.zeros(3)) for _ in range(2))]
        parameters[2].requires_grad_(not frozen)
        sums = ChunkedSum({p: 2 - n for n, p in enumerate(parameters)}, transport)
        sums.chunk_bytes = chunk_bytes
        gradients = StepGradients(parameters, parameters, sums, transport)
        found = []
        for window in each[rank]:
            for number, (values, factor) in enumerate(window):
                last = number == len(window) - 1
                gradients.begin(last=last)
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.grad = None if value is None else torch.full_like(parameter, value)
                for segment in range(2, -1, -1) if sums.active else ():
                    sums.handlers()["S", "b"](Action("S", segment, "b", 0))
                gradients.end()
                for parameter in parameters if number == 0 else ():
                    parameter.grad = None
                gradients.install(torch.tensor(factor), last=last)
            found.append([None if p.grad is None else p.grad.unique().item() for p in parameters])
            parameters[2].requires_grad_()
        return found

    return on_two_replicas(play)


@pytest.mark.parametrize("chunk_bytes", [None, ONE_BYTE, 16, HUGE])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.3])
def test_only_the_last_batch_of_a_window_sums_and_includes_the_others(chunk_bytes: int | None, factor: float) -> None:
    first = [[([1.0, None, None], factor), ([2.0, 3.0, None], factor)], [([5.0, None, 7.0], factor)]]
    second = [[([10.0, None, None], factor), ([20.0, None, None], factor)], [([50.0, 60.0, 70.0], factor)]]
    found = windows(chunk_bytes, first, second)
    assert found[0] == found[1]
    assert found[0][0] == [pytest.approx(33 * factor), pytest.approx(3 * factor), None]
    assert found[0][1] == pytest.approx([55 * factor, 60 * factor, 77 * factor])


def test_windows_have_the_very_numbers_of_a_sum_at_the_end() -> None:
    third = 1 / 3
    first = [[([0.1, 0.2, 0.7], third), ([1.1, 3.3, None], third), ([0.7, 0.9, 1.3], third)]] * 2
    second = [[([0.3, None, 0.9], third), ([0.1, 5.3, None], third), ([2.7, 0.9, 0.3], third)]] * 2
    assert windows(16, first, second) == windows(None, first, second)


def test_batches_of_a_window_whose_losses_are_scaled_differently_are_refused() -> None:
    window = [[([1.0, 1.0, 1.0], 0.5), ([1.0, 1.0, 1.0], 0.25)]]
    with pytest.raises(PlanError, match=r"scaled by 0\.25 for backward, that of the batch before by 0\.5"):
        windows(16, window, window)
    assert windows(None, window, window)[0][0] == [1.5] * 3


def test_parameters_may_start_to_train() -> None:
    steps: list[list[Batch]] = [[([1.0, 2.0, None], 1.0)], [([1.0, 2.0, 3.0], 1.0)]]
    assert windows(16, steps, steps, frozen=True) == [[[2.0, 4.0, None], [2.0, 4.0, 6.0]]] * 2


def test_a_step_without_backward_leaves_nothing_behind() -> None:
    def play(rank: int, transport: LocalTransport) -> float:
        (parameter,) = [nn.Parameter(torch.zeros(5))]
        sums = ChunkedSum({parameter: 0}, transport)
        sums.chunk_bytes = 8
        gradients = StepGradients([parameter], [parameter], sums, transport)
        for _ in range(2):
            gradients.begin(last=True)
            parameter.grad = torch.full((5,), rank + 1.0)
            sums.handlers()["S", "b"](Action("S", 0, "b", 0))
            gradients.end()
        gradients.install(torch.ones(()), last=True)
        assert parameter.grad is not None
        return parameter.grad.unique().item()

    assert on_two_replicas(play) == [3.0, 3.0]
