"""Divide a batch into micro-batches and weigh them, without knowing what is in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import split_sizes
from lightning_afd.flattened import borders_of, cut, like

IGNORED_LABEL = -100


def split_batch(batch: Any, micro_batches: int) -> list[Any]:
    """Cut all tensors along their first dimension into at most `micro_batches` runs of rows.

    Lists and tuples with one entry per row are cut too; scalars and everything else go to every micro-batch. A single
    row that holds several documents is cut between documents. Raises PlanError where there is no row to divide by or
    where tensors disagree.
    """
    borders = borders_of(batch)
    if borders is not None:
        return cut(batch, borders, micro_batches)
    rows = batch_rows(batch)
    parts = min(micro_batches, rows)
    pieces, start = [], 0
    for size in split_sizes(rows, parts):
        pieces.append(_slice(batch, rows, start, start + size))
        start += size
    return pieces


def batch_rows(batch: Any) -> int:
    """Rows of a batch: the first dimension that all of its tensors share."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0}
    remedy = "define afd_split(batch, micro_batches) in the LightningModule; it returns a list of batches"
    if not sizes:
        raise PlanError(f"a batch of type {type(batch).__name__} holds no tensor with rows to split: {remedy}")
    if len(sizes) > 1:
        raise PlanError(f"the tensors of a batch have {sorted(sizes)} rows (first dimension), which differ: {remedy}")
    rows = sizes.pop()
    if rows == 0:
        raise PlanError("a batch with 0 rows cannot be trained: drop empty batches in the dataloader")
    return int(rows)


def rows_or_one(batch: Any) -> int:
    """Rows of a batch, or 1 where it has no rows that could be counted."""
    try:
        return batch_rows(batch)
    except PlanError:
        return 1


def loss_weight(batch: Any) -> float:
    """Valid labels of a micro-batch (not -100, shifted by one as causal language models shift), else its rows."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    if not isinstance(labels, Tensor):
        return float(batch_rows(batch))
    counted = labels[..., 1:] if labels.dim() > 1 else labels
    return float((counted != IGNORED_LABEL).sum().item())


def merge_outputs(outputs: list[Any], weights: list[float], loss: Tensor) -> Any:
    """What the user's hooks see as the step's output: the loss of the batch, and other entries joined.

    Scalars are averaged with the micro-batches' weights, tensors with rows concatenated, the rest collected in lists.
    """
    if not outputs or not isinstance(outputs[0], Mapping):
        return loss
    merged: dict[str, Any] = {"loss": loss}
    keys = list(outputs[0])
    if any(list(output) != keys for output in outputs):
        raise PlanError(
            f"training_step returned the entries {keys} and others for another micro-batch: return the same"
        )
    for key in keys:
        if key != "loss":
            merged[key] = _merge([output[key] for output in outputs], weights)
    return merged


def _merge(values: list[Any], weights: list[float]) -> Any:
    if all(isinstance(value, Tensor) and value.dim() > 0 for value in values):
        return torch.cat(values)
    if all(isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0) for value in values):
        total = sum(weights)
        weighted = [value * weight for value, weight in zip(values, weights, strict=True) if weight]  # 0 x NaN is NaN
        return sum(weighted) / total if total else values[0]
    return values


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in mappings, lists and tuples: what is cut into micro-batches."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def _slice(value: Any, rows: int, start: int, end: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:end] if value.dim() > 0 else value
    if isinstance(value, Mapping):
        items = {key: _slice(item, rows, start, end) for key, item in value.items()}
        return items if type(value) is dict else like(value, items)
    if isinstance(value, (list, tuple)) and not isinstance(value, str):
        if len(value) == rows and not any(True for _ in tensors_in(value)):
            return value[start:end]
        items_ = [_slice(item, rows, start, end) for item in value]
        return type(value)(*items_) if hasattr(value, "_fields") else type(value)(items_)
    return value
