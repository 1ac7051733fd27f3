"""Micro-batches are runs of rows of the batch, weights are valid labels, and outputs come back together."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding

from lightning_afd.batch import batch_rows, loss_weight, merge_outputs, split_batch
from lightning_afd.errors import PlanError


class Sample(NamedTuple):
    ids: Tensor
    names: list[str]


def nested(rows: int) -> dict[str, Any]:
    """All kinds of containers that collate functions return."""
    numbers = torch.arange(rows)
    return {
        "ids": numbers[:, None] * 10 + torch.arange(3),
        "pair": (numbers, [numbers.float(), {"deep": numbers[:, None, None]}]),
        "sample": Sample(numbers + 7, [f"row {row}" for row in range(rows)]),
        "names": [f"name {row}" for row in range(rows)],
        "scalar": torch.tensor(2.5),
        "epoch": 3,
        "task": "copy",
        "nothing": None,
        "tags": ("a",) * (rows + 1),
    }


@given(rows=st.integers(1, 40), micro_batches=st.integers(1, 50))
def test_pieces_are_balanced_runs_of_rows(rows: int, micro_batches: int) -> None:
    batch = nested(rows)
    pieces = split_batch(batch, micro_batches)
    sizes = [len(piece["ids"]) for piece in pieces]
    assert len(pieces) == min(rows, micro_batches)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert [batch_rows(piece) for piece in pieces] == sizes
    for pick in (
        lambda b: b["ids"],
        lambda b: b["pair"][0],
        lambda b: b["pair"][1][0],
        lambda b: b["pair"][1][1]["deep"],
        lambda b: b["sample"].ids,
    ):
        assert torch.equal(torch.cat([pick(piece) for piece in pieces]), pick(batch))
    for pick in (lambda b: b["names"], lambda b: b["sample"].names):
        assert [name for piece in pieces for name in pick(piece)] == pick(batch)
    for piece in pieces:
        assert [len(piece["names"]), len(piece["sample"].names)] == [batch_rows(piece)] * 2
        for key in ("scalar", "epoch", "task", "nothing", "tags"):
            assert piece[key] is batch[key] or piece[key] == batch[key]
        assert type(piece["sample"]) is Sample and type(piece["pair"]) is tuple and type(piece["pair"][1]) is list


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, BatchEncoding, lambda items: defaultdict(list, items)])
def test_mappings_of_other_types_are_split_and_kept(kind: Any) -> None:
    batch = kind({"input_ids": torch.arange(6).reshape(3, 2), "texts": ["a", "b", "c"]})
    first, second = split_batch(batch, 2)
    assert type(first) in (type(batch), dict)
    assert (type(first) is dict) == isinstance(batch, defaultdict)
    assert torch.equal(torch.cat([first["input_ids"], second["input_ids"]]), batch["input_ids"])
    assert [first["texts"], second["texts"]] == [["a", "b"], ["c"]]


def test_a_tensor_alone_and_a_tuple_with_as_many_entries_as_rows() -> None:
    assert [piece.tolist() for piece in split_batch(torch.arange(3), 2)] == [[0, 1], [2]]
    x, y = torch.arange(2), torch.arange(2) * 3
    assert [[t.tolist() for t in piece] for piece in split_batch((x, y), 2)] == [[[0], [0]], [[1], [3]]]


def test_pieces_are_views() -> None:
    batch = torch.zeros(4)
    split_batch(batch, 2)[1].fill_(1)
    assert batch.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.zeros(3, 2), "y": [torch.zeros(4)]}, r"\[3, 4\] rows"),
        ({"x": torch.tensor(1.0), "y": ["a", "b"]}, "a batch of type dict holds no tensor with rows"),
        (object(), "a batch of type object holds no tensor"),
        ([], "a batch of type list holds no tensor"),
        (torch.zeros(0, 5), "0 rows"),
    ],
)
def test_batch_that_cannot_be_split_is_refused_with_the_remedy(batch: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words) as failure:
        split_batch(batch, 2)
    assert "afd_split" in str(failure.value) or "dataloader" in str(failure.value)


class Labelled:
    def __init__(self, labels: Tensor) -> None:
        self.labels = labels


MASKED = torch.tensor([[1, -100, 3, 4], [-100, -100, -100, 9]])


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        ({"labels": MASKED}, 3),  # the first column is no target: 3, 4 and 9
        (Labelled(MASKED), 3),
        (BatchEncoding({"labels": MASKED}), 3),
        ({"labels": torch.full((2, 4), -100)}, 0),
        ({"labels": torch.tensor([[1], [2]])}, 0),  # one position: nothing to predict
        ({"labels": torch.tensor([1, 0, -100, 2])}, 3),  # classes
        ({"x": torch.zeros(5, 2)}, 5),
        ({"x": torch.zeros(5, 2), "labels": None}, 5),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ({"x": torch.zeros(2, 2), "labels": ["a", "b"]}, 2),
    ],
)
def test_weight_is_the_number_of_valid_labels_else_of_rows(batch: Any, weight: float) -> None:
    assert loss_weight(batch) == weight


LOSS = torch.tensor(5.0)


def test_outputs_of_micro_batches_are_joined() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "acc": torch.tensor(0.5), "z": 2.0, "rows": torch.zeros(2, 3), "text": "a"},
        {"loss": torch.tensor(2.0), "acc": torch.tensor(1.0), "z": 4.0, "rows": torch.ones(1, 3), "text": "b"},
    ]
    merged = merge_outputs(outputs, [3.0, 1.0], LOSS)
    assert merged["loss"] is LOSS
    assert (merged["acc"].item(), merged["z"]) == (0.625, 2.5)
    assert torch.equal(merged["rows"], torch.cat([torch.zeros(2, 3), torch.ones(1, 3)]))
    assert merged["text"] == ["a", "b"]
    assert list(merged) == ["loss", "acc", "z", "rows", "text"]


@pytest.mark.parametrize("outputs", [[], [torch.tensor(1.0), torch.tensor(2.0)]])
def test_outputs_that_are_the_loss_alone(outputs: list[Tensor]) -> None:
    assert merge_outputs(outputs, [1.0] * len(outputs), LOSS) is LOSS


def test_masked_micro_batches_do_not_count_in_the_average() -> None:
    outputs = [{"loss": LOSS, "nll": torch.tensor(float("nan"))}, {"loss": LOSS, "nll": torch.tensor(0.25)}]
    assert merge_outputs(outputs, [0.0, 7.0], LOSS)["nll"].item() == 0.25
    assert merge_outputs(outputs[:1], [0.0], LOSS)["nll"].isnan()


def test_micro_batches_must_return_the_same_entries() -> None:
    with pytest.raises(PlanError, match=r"entries \['loss', 'acc'\] and others"):
        merge_outputs([{"loss": LOSS, "acc": 1.0}, {"loss": LOSS}], [1.0, 1.0], LOSS)
