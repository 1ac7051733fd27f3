"""Batches whose documents lie one behind another in a single row of T tokens, cut at the documents' borders.

transformers' DataCollatorWithFlattening makes them: `input_ids`, `labels` and `position_ids` [1, T], positions that
restart with each document, and, for flash attention, `cu_seq_lens_q` and `cu_seq_lens_k` [D + 1] (the borders of D
documents) with `max_length_q` and `max_length_k`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_afd.errors import PlanError

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")


def borders_of(batch: Any) -> list[int] | None:
    """Where documents begin, and T, of a batch with several of them in its single row; None for any other batch.

    Without `cu_seq_lens_q` a document begins where a position does not follow the one before it, as transformers reads
    them. Raises PlanError where the borders given are not those of the tokens.
    """
    if not isinstance(batch, Mapping):
        return None
    ids, positions, given = (batch.get(name) for name in ("input_ids", "position_ids", BORDERS[0]))
    if not isinstance(ids, Tensor) or ids.dim() < 2 or ids.shape[0] != 1:
        return None
    if isinstance(given, Tensor):
        borders = [int(border) for border in given.tolist()]
        if borders[:1] != [0] or borders[-1] != ids.shape[1] or any(b <= a for a, b in pairwise(borders)):
            raise PlanError(
                f"cu_seq_lens_q={borders} of a batch with {ids.shape[1]} tokens: borders must rise from 0 to that"
            )
        return borders
    if not isinstance(positions, Tensor) or positions.shape != ids.shape[:2]:
        return None
    starts = (positions[0].diff() != 1).nonzero().flatten() + 1
    return [0, *starts.tolist(), ids.shape[1]] if len(starts) else None


def cut(batch: Mapping[str, Any], borders: Sequence[int], parts: int) -> list[Any]:
    """At most `parts` runs of documents with nearly equal numbers of tokens, each with borders of its own."""
    edges = _edges(borders, min(parts, len(borders) - 1))
    return [_piece(batch, borders, first, last) for first, last in pairwise(edges)]


def _edges(borders: Sequence[int], parts: int) -> list[int]:
    """Numbers of the documents at which runs begin: the border that is nearest to an equal share, each run with one."""
    documents, edges = len(borders) - 1, [0]
    for part in range(1, parts):
        share = borders[-1] * part / parts
        possible = range(edges[-1] + 1, documents - (parts - part) + 1)
        edges.append(min(possible, key=lambda number: abs(borders[number] - share)))
    return [*edges, documents]


def _piece(batch: Mapping[str, Any], borders: Sequence[int], first: int, last: int) -> Any:
    start, end = borders[first], borders[last]
    longest = max(b - a for a, b in pairwise(borders[first : last + 1]))
    items: dict[str, Any] = {}
    for name, value in batch.items():
        if name in BORDERS:
            items[name] = value[first : last + 1] - value[first]
        elif name in LONGEST:
            items[name] = longest
        elif isinstance(value, Tensor):
            items[name] = _tokens(name, value, borders[-1])[:, start:end] if value.dim() else value
        elif isinstance(value, (list, tuple)) and len(value) == len(borders) - 1:
            items[name] = value[first:last]
        else:
            items[name] = value
    return items if type(batch) is dict else like(batch, items)


def _tokens(name: str, value: Tensor, tokens: int) -> Tensor:
    if value.shape[:2] != (1, tokens):
        raise PlanError(
            f"{name} has the shape {tuple(value.shape)} in a batch of documents in one row of {tokens} tokens: make it "
            f"(1, {tokens}, ...), or define afd_split(batch, micro_batches) in the LightningModule"
        )
    return value


def like(value: Mapping[str, Any], items: dict[str, Any]) -> Any:
    """The same kind of mapping (transformers' BatchEncoding, UserDict, OrderedDict ...) with other values."""
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
