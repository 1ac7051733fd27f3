"""`self.log` of code that runs once per micro-batch: recorded where it ends, agreed, replayed once on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_afd.errors import PlanError
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies.metric_objects import MetricObjects
from lightning_afd.transport.base import Collectives

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REDUCTIONS: dict[Any, str] = {"avg": "mean", torch.mean: "mean", torch.max: "max", torch.min: "min", torch.sum: "sum"}
_REDUCTIONS |= {name: name for name in ("mean", "max", "min", "sum")}


JOINED: Any = "joined by strategy afd"
"""Stands for a process group where a value is the same on all ranks already: Lightning neither reduces it nor warns."""


@dataclass(frozen=True)
class Key:
    """One logged name and how it is logged; all ranks hold the same list of keys."""

    name: str
    reduction: str
    dtype: str
    """Of the value of a step; empty where there is none, as for a metric that was updated but not called."""
    options: tuple[tuple[str, Any], ...]
    metric: str = ""
    """Attribute name of a metric object; empty for numbers."""

    def text(self) -> str:
        return f"{self.name} {self.reduction} {self.dtype} {self.options} {self.metric}"


@dataclass
class _Record:
    key: Key
    values: list[tuple[float | Tensor, float, float]] = field(default_factory=list)
    """(value, weight, batch size) per micro-batch; tensors are read once, at the end of the step."""


class Recorder:
    """Collects what one rank's user code logs during a step."""

    def __init__(self, metrics: MetricObjects) -> None:
        self._metrics = metrics
        self._records: dict[str, _Record] = {}
        self._weight, self._rows = 1.0, 1

    @contextmanager
    def capture(self, module: pl.LightningModule) -> Iterator[None]:
        """Replace `module.log` for the time of a step."""
        self._records = {}
        module.__dict__["log"] = self._record
        try:
            yield
        finally:
            module.__dict__.pop("log", None)

    @contextmanager
    def micro_batch(self, weight: float, rows: int) -> Iterator[None]:
        """What is logged inside belongs to a micro-batch of `rows` rows and weighs `weight`; 0 leaves it out."""
        self._weight, self._rows = weight, rows
        yield

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **options}
        batch_size = float(options.pop("batch_size", None) or self._rows)
        attribute = options.pop("metric_attribute", None)
        for gone in ("sync_dist", "sync_dist_group", "enable_graph", "rank_zero_only"):
            options.pop(gone, None)
        reduction = _reduction(name, options.pop("reduce_fx", "mean"))
        if isinstance(value, Metric):
            attribute = attribute or self._attribute(name, value)
            value = value._forward_cache
        else:
            attribute = ""
        number, dtype = (0.0, "") if attribute and value is None else _number(name, value)
        key = Key(name, reduction, dtype, tuple(sorted(options.items())), attribute)
        record = self._records.setdefault(name, _Record(key))
        record.values.append((number, self._weight, batch_size))

    def _attribute(self, name: str, metric: Metric) -> str:
        names = self._metrics.names()
        if id(metric) not in names:
            raise MisconfigurationException(
                f"self.log({name!r}) of a {type(metric).__name__} that is no attribute of the LightningModule: "
                "assign it in __init__, as self.metric = ..."
            )
        return names[id(metric)]

    @property
    def keys(self) -> list[Key]:
        return [record.key for record in self._records.values()]

    def row(self, *, by_rows: bool) -> list[float]:
        """Per key (reduced value, weight, batch size): what this rank brings to the exchange."""
        row: list[float] = []
        for record in self._records.values():
            kept = [(float(value), rows if by_rows else weight, rows) for value, weight, rows in record.values]
            kept = [item for item in kept if item[1] > 0]
            row += [*_reduce(record.key.reduction, kept), sum(rows for _, _, rows in kept)]
        return row


@dataclass(frozen=True)
class Logged:
    """One value for all ranks."""

    key: Key
    value: float
    batch_size: int

    def replay(self, module: pl.LightningModule, metrics: MetricObjects) -> None:
        """Call the real `self.log` once."""
        dtype, attribute = self.key.dtype, self.key.metric
        value: Any = torch.tensor(self.value, dtype=getattr(torch, dtype), device=module.device) if dtype else None
        reduction: Any = self.key.reduction
        options: dict[str, Any] = {"sync_dist": True, "sync_dist_group": JOINED, **dict(self.key.options)}
        if attribute:
            value = metrics.shared(attribute, value)
            options["metric_attribute"] = attribute
        module.log(self.key.name, value, reduce_fx=reduction, batch_size=self.batch_size, **options)


class Exchange:
    """Agrees on logged values: one all-gather per step, and one broadcast whenever the logged names change.

    Each rank sends a fixed head, a hash of its keys and three numbers per key.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._keys: list[Key] = []
        self._slots = 0

    def share(
        self, head: Sequence[float], recorder: Recorder, *, speaks: bool, by_rows: bool
    ) -> tuple[list[list[float]], list[Logged]]:
        """Returns every rank's head and the values that all ranks log; `speaks` where user code has run."""
        mine = recorder.row(by_rows=by_rows) if speaks else []
        first = [float(speaks), self._hash(recorder.keys) if speaks else 0.0, *head]
        rows = self._gather(first, mine)
        speaking = [row for row in rows if row[0]]
        if any(row[1] != self._hash(self._keys) for row in speaking):
            self._learn(recorder.keys, rows)
            rows = self._gather(first, mine)
            speaking = [row for row in rows if row[0]]
        values = [row[len(first) :] for row in speaking]
        logged = [_join(key, [row[3 * i : 3 * i + 3] for row in values]) for i, key in enumerate(self._keys)]
        return [row[2 : len(first)] for row in rows], [item for item in logged if item is not None]

    def _gather(self, first: list[float], mine: list[float]) -> list[list[float]]:
        padded = (mine + [0.0] * (3 * self._slots))[: 3 * self._slots]
        return self._collectives.all_gather([*first, *padded])

    def _learn(self, keys: list[Key], rows: list[list[float]]) -> None:
        """Take over the keys of the first rank that speaks; raises PlanError where another one logs other names."""
        hashes = {row[1] for row in rows if row[0]}
        first = next(rank for rank, row in enumerate(rows) if row[0])
        told = self._collectives.broadcast_object(keys, first)
        assert isinstance(told, list)
        self._keys = told
        self._slots = max(self._slots, len(told))
        if len(hashes) > 1:
            names = ", ".join(key.name for key in told)
            raise PlanError(f"ranks log different values in one step (rank {first}: {names}): log the same on all")

    @staticmethod
    def _hash(keys: list[Key]) -> float:
        return float(zlib.crc32("\n".join(key.text() for key in keys).encode()))


_LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")


def _reduce(reduction: str, values: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Reduced value and total weight of (value, weight, _) items."""
    if not values:
        return 0.0, 0.0
    numbers, weights = [value for value, _, _ in values], [weight for _, weight, _ in values]
    total = sum(weights)
    if reduction == "mean":
        return sum(n * w for n, w in zip(numbers, weights, strict=True)) / total, total
    return {"max": max, "min": min, "sum": sum}[reduction](numbers), total  # type: ignore[operator]


def _join(key: Key, parts: list[list[float]]) -> Logged | None:
    """The value over all A ranks; None where all of its micro-batches were masked."""
    kept = [(value, weight, rows) for value, weight, rows in parts if weight > 0]
    if not kept:
        return None
    value, _ = _reduce(key.reduction, kept)
    return Logged(key, value, int(sum(rows for _, _, rows in kept)))


def _reduction(name: str, reduce_fx: Any) -> str:
    if reduce_fx not in _REDUCTIONS:
        raise MisconfigurationException(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): micro-batches are joined by mean, sum, max or min"
        )
    return _REDUCTIONS[reduce_fx]


def _number(name: str, value: Any) -> tuple[float | Tensor, str]:
    if isinstance(value, Tensor) and value.numel() == 1:
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        return value.detach(), str(dtype).removeprefix("torch.")
    if isinstance(value, (int, float)):
        return float(value), str(torch.get_default_dtype()).removeprefix("torch.")
    raise MisconfigurationException(
        f"self.log({name!r}) of a {type(value).__name__}: this strategy logs numbers, tensors with one element, and "
        "torchmetrics objects whose value is one number"
    )
