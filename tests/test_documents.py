"""Documents in one row: cut into micro-batches at their borders, and with the loss and gradients of each alone."""

from __future__ import annotations

import importlib
import inspect
import re
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_job import LocalJob, plain_step, worst_difference
from tiny import tiny_hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BatchEncoding
from varlen import NAME, varlen_kernel

from lightning_afd.batch import loss_weight, split_batch
from lightning_afd.documents import BalancedSampler, FlattenRows, PackedRows, Replicas
from lightning_afd.errors import PlanError
from lightning_afd.model.document_masks import LEAVE_POSITIONS_OUT, separate_documents
from lightning_afd.packing import attention_work, deal_plainly, loads
from lightning_afd.placement import Layout

LENGTHS = [7, 3, 25, 1, 1, 40, 23]


def flattened(lengths: list[int], flash: bool = True) -> dict[str, Any]:
    """A batch of such documents, as a collate function makes it; tokens count from 0."""
    ids = torch.arange(sum(lengths))
    batch = FlattenRows()([list(ids.split(lengths))])
    return batch if flash else {name: value for name, value in batch.items() if name[:3] not in ("cu_", "max")}


def documents_of(batch: Any) -> list[list[int]]:
    borders = batch["cu_seq_lens_q"].tolist()
    return [batch["input_ids"][0, start:end].tolist() for start, end in pairwise(borders)]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), parts=st.integers(1, 15))
def test_micro_batches_are_runs_of_whole_documents(lengths: list[int], parts: int) -> None:
    batch = flattened(lengths)
    pieces = split_batch(batch, parts)
    assert len(pieces) == min(parts, len(lengths))
    assert [document for piece in pieces for document in documents_of(piece)] == documents_of(batch)
    for piece in pieces:
        assert piece.keys() == batch.keys()
        own = [len(document) for document in documents_of(piece)]
        assert piece["input_ids"].shape == (1, sum(own))
        assert (piece["max_length_q"], piece["max_length_k"]) == (max(own),) * 2
        assert piece["position_ids"].tolist() == [[i for length in own for i in range(length)]]
        assert torch.equal(piece["cu_seq_lens_k"], piece["cu_seq_lens_q"])
        assert piece["cu_seq_lens_q"].dtype == torch.int32
        assert loss_weight(piece) == sum(own) - len(own)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([piece[name] for piece in pieces], dim=1), batch[name])


def test_rows_of_equal_length_become_equal_micro_batches() -> None:
    rows = PackedRows(torch.arange(96), [*LENGTHS[:-1], 19], 16)
    pieces = split_batch(FlattenRows()([rows[i] for i in range(6)]), 3)
    assert [piece["input_ids"].shape[1] for piece in pieces] == [32, 32, 32]


def test_borders_are_read_off_the_positions_where_none_are_given() -> None:
    batch = flattened(LENGTHS, flash=False) | {"scale": torch.tensor(2.0), "names": list("abcdefg"), "task": "copy"}
    want = split_batch(flattened(LENGTHS), 3)
    got = split_batch(BatchEncoding(batch), 3)
    assert [piece["input_ids"].tolist() for piece in got] == [piece["input_ids"].tolist() for piece in want]
    assert [name for piece in got for name in piece["names"]] == list("abcdefg")
    assert all(type(piece) is BatchEncoding and (piece["scale"], piece["task"]) == (2.0, "copy") for piece in got)


def test_a_single_row_of_one_document_is_one_row() -> None:
    batch = {"input_ids": torch.arange(5)[None], "position_ids": torch.arange(5)[None]}
    assert len(split_batch(batch, 4)) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 7, 99])}, r"\[0, 7, 99\] of a batch with 100 tokens: borders must rise"),
        ({"cu_seq_lens_q": torch.tensor([0, 70, 7, 100])}, "borders must rise"),
        ({"images": torch.zeros(3, 4)}, r"images has the shape \(3, 4\) in a batch of documents .* define afd_split"),
    ],
)
def test_batches_that_cannot_be_cut(change: dict[str, Tensor], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        split_batch(flattened(LENGTHS) | change, 2)


def test_rows_hold_all_tokens_in_order() -> None:
    rows = PackedRows(torch.arange(100), LENGTHS, 16)
    assert torch.equal(rows.tokens(), torch.arange(96))
    assert torch.equal(torch.cat([token for i in range(len(rows)) for token in rows[i]]), rows.tokens())
    assert [attention_work(row) for row in rows.lengths] == rows.work
    first = {rows[i][j][0].item() for i in range(len(rows)) for j in range(len(rows[i]))}
    assert set(rows.targets().tolist()) == set(range(96)) - first
    with pytest.raises(PlanError, match="99 tokens"):
        PackedRows(torch.arange(100), [99], 16)


WORK = [(i * 7919) % 1000 + 1 for i in range(53)]


def sampled(replicas: int, batch_size: int, epoch: int = 0) -> list[list[list[int]]]:
    """Rows by global batch and replica."""
    samplers = [
        BalancedSampler(WORK, batch_size, Replicas(num_replicas=replicas, rank=rank), seed=3)
        for rank in range(replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    rows = [list(sampler) for sampler in samplers]
    assert [len(own) for own in rows] == [len(sampler) for sampler in samplers]
    return [[own[i : i + batch_size] for own in rows] for i in range(0, len(rows[0]), batch_size)]


@pytest.mark.parametrize(("replicas", "batch_size"), [(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)])
def test_global_batches_do_not_depend_on_the_number_of_replicas(replicas: int, batch_size: int) -> None:
    whole = sampled(1, 12)
    assert len(whole) == 4
    assert [sorted(chain.from_iterable(batch)) for batch in sampled(replicas, batch_size)] == [
        sorted(b[0]) for b in whole
    ]
    assert sampled(replicas, batch_size, epoch=1) != sampled(replicas, batch_size)
    assert sampled(replicas, batch_size, epoch=1) == sampled(replicas, batch_size, epoch=1)


def test_replicas_have_nearly_equal_work() -> None:
    for batch in sampled(3, 4):
        whole = list(chain.from_iterable(batch))
        work = [WORK[row] for row in whole]
        busiest = max(sum(WORK[row] for row in own) for own in batch)
        assert busiest <= max(loads(work, deal_plainly(12, 3)))
    dealt, plain = BalancedSampler(WORK, 4, Replicas(num_replicas=3)).imbalance()
    assert 1.0 <= dealt < 1.05 < 1.15 < plain


def test_micro_batches_have_nearly_equal_work() -> None:
    replicas = Replicas(num_replicas=2, rank=1)
    plain, dealt = (list(BalancedSampler(WORK, 12, replicas, micro_batches=parts)) for parts in (1, 3))
    assert plain != dealt
    for start in range(0, len(plain), 12):
        assert sorted(plain[start : start + 12]) == sorted(dealt[start : start + 12])
        work = [[WORK[row] for row in rows[start : start + 12]] for rows in (plain, dealt)]
        before, after = (max(sum(own[i : i + 4]) for i in (0, 4, 8)) * 3 / sum(own) for own in work)
        assert 1.0 <= after < 1.08 and after < before


def test_micro_batches_that_do_not_divide_a_batch_are_said() -> None:
    BalancedSampler(WORK, 12, Replicas(), micro_batches=4)
    with pytest.warns(UserWarning, match="micro_batches=5 does not divide batch_size=12") as said:
        assert BalancedSampler(WORK, 12, Replicas(), micro_batches=5).micro_batches == 1
    assert len(said) == 1


@pytest.mark.parametrize(("batch_size", "micro_batches"), [(12, 0), (0, 1), (12, -3)])
def test_batches_of_nothing_are_refused(batch_size: int, micro_batches: int) -> None:
    said = f"batch_size={batch_size} with micro_batches={micro_batches}: at least 1 of each is needed"
    with pytest.raises(PlanError, match=said):
        BalancedSampler(WORK, batch_size, Replicas(), micro_batches=micro_batches)


def test_too_few_rows_for_a_batch() -> None:
    with pytest.raises(PlanError, match="53 rows of packed documents are fewer than one batch of 2 replicas x 30 rows"):
        BalancedSampler(WORK, 30, Replicas(num_replicas=2))


def packed(documents: list[Tensor]) -> Tensor:
    """[1, T] ids of documents, the first one of each as ~id: no label, as `local_job.labels` counts."""
    return torch.cat([torch.cat([~document[:1], document[1:]]) for document in documents])[None]


def packed_loss(model: nn.Module, marked_1T: Tensor, *, restart: bool = True, **options: Any) -> Tensor:
    """Mean next-token loss inside documents, in the model's dtype."""
    is_first = marked_1T[0] < 0
    ids_1T = torch.where(marked_1T < 0, ~marked_1T, marked_1T)
    lengths = torch.cat([is_first.nonzero().flatten(), torch.tensor([len(is_first)])]).diff().tolist()
    batch = FlattenRows()([list(ids_1T[0].split(lengths))])
    assert torch.equal(batch["labels"] == -100, is_first[None])
    labels = batch.pop("labels")
    if not restart:
        batch["position_ids"] = torch.arange(len(is_first))[None]
    logits = model(**batch, **options).logits
    return cross_entropy(logits[0, :-1], labels[0, 1:])


def documents(seed: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


LAYOUTS = [Layout(attention=2, ffn=2), Layout(attention=2, ffn=2, groups=2)]
MODELS = [("qwen3_moe", "sdpa"), ("deepseek_v3", "sdpa"), ("gpt_oss", "eager")]


def model_of(name: str, kernel: str, *, separate: bool = True) -> nn.Module:
    """Windows of 8 tokens in gpt_oss are shorter than most documents, so that they are at work."""
    model = tiny_hf(name).double()
    model.set_attn_implementation(kernel)  # type: ignore[operator]
    if separate:
        separate_documents(model)
    return model


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize(("name", "kernel"), MODELS)
def test_packed_documents_are_the_separate_ones(name: str, kernel: str, layout: Layout) -> None:
    """On one device, and on attention and FFN ranks with several uneven micro-batches."""
    model = model_of(name, kernel)
    parts = [documents(a, lengths) for a, lengths in enumerate(([12, 5, 9, 20, 1, 4], [17, 3, 11, 2, 10, 6]))]
    separate = [[document[None] for document in part if len(document) > 1] for part in parts]
    cut = [[packed(part[:2]), packed(part[2:3]), packed(part[3:])] for part in parts]
    loss, grads = plain_step(model, separate)
    packed_value, packed_grads = plain_step(model, cut, packed_loss)
    assert packed_value == pytest.approx(loss, rel=1e-7)
    assert worst_difference(packed_grads, grads, noise=1e-6) < 1e-6
    outcome = LocalJob(model, layout, loss=packed_loss, micro_batches=3).step(cut)
    assert outcome.difference(loss, grads, noise=1e-6) < 1e-6


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_flash_kernels_get_the_borders_of_each_micro_batch(name: str) -> None:
    """In every layer of both attention groups, and nothing else to keep documents apart."""
    lengths = ([12, 5, 9, 20, 1, 4], [17, 3, 11, 2, 10, 6])
    parts = [documents(a, own) for a, own in enumerate(lengths)]
    cut = [[packed(part[:2]), packed(part[2:3]), packed(part[3:])] for part in parts]
    loss, grads = plain_step(model_of(name, "sdpa"), cut, packed_loss)
    borders = {tuple(np.cumsum([0, *own[a:b]]).tolist()) for own in lengths for a, b in ((0, 2), (2, 3), (3, 6))}
    with varlen_kernel() as seen:
        outcome = LocalJob(model_of(name, NAME), LAYOUTS[1], loss=packed_loss, micro_batches=3).step(cut)
    assert outcome.difference(loss, grads, noise=1e-6) < 1e-6
    assert set(map(tuple, seen)) == borders
    with varlen_kernel(ignores_borders=True):
        outcome = LocalJob(model_of(name, NAME), LAYOUTS[0], loss=packed_loss, micro_batches=3).step(cut)
    assert outcome.difference(loss, grads, noise=1e-6) > 1e-3


@pytest.mark.parametrize(
    ("name", "kernel", "separate", "options"),
    [
        ("qwen3_moe", "sdpa", True, {"restart": False}),
        ("qwen3_moe", "sdpa", False, {"use_cache": True}),
        ("gpt_oss", "eager", False, {}),
    ],
)
def test_what_documents_that_see_one_another_would_change(
    name: str, kernel: str, separate: bool, options: dict[str, bool]
) -> None:
    """The test above would find positions that don't restart, a cache, and masks that are made without positions."""
    model = model_of(name, kernel, separate=separate)
    part = documents(0, [12, 5, 9])
    loss, grads = plain_step(model, [[document[None] for document in part]])
    got, got_grads = plain_step(model, [[packed(part)]], lambda model, ids: packed_loss(model, ids, **options))
    assert abs(got - loss) / loss > 1e-4
    assert worst_difference(got_grads, grads) > 1e-2


def test_rows_side_by_side_stay_apart_too() -> None:
    """[B, S] with positions that restart, as a collate function of the user's may make it."""
    model = model_of("gpt_oss", "eager")
    rows = [documents(0, [12, 5]), documents(1, [3, 14])]
    ids, positions = (
        torch.stack([torch.cat([make(document) for document in row]) for row in rows])
        for make in (lambda document: document, lambda document: torch.arange(len(document)))
    )
    with torch.no_grad():
        got = model(input_ids=ids, position_ids=positions).logits
        want = torch.stack([torch.cat([model(document[None]).logits[0] for document in row]) for row in rows])
        masked = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(got, want, atol=1e-6)
    assert not torch.allclose(masked, want, atol=1e-3)  # a mask of the user's is left as it is


@pytest.mark.parametrize("name", LEAVE_POSITIONS_OUT)
def test_models_that_get_masks_would_make_them_without_positions(name: str) -> None:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    masks = re.findall(r"mask_kwargs = \{(.*?)\}", inspect.getsource(module), re.DOTALL)
    assert masks and not any("position_ids" in arguments for arguments in masks)
