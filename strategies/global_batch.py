"""How many rows one optimizer step sees: said where a fit goes on with another number than it was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """Rows of one optimizer step, by what makes them up."""

    replicas: int
    rows: int
    """Of one batch of one replica."""
    accumulated: int
    """Batches per optimizer step."""

    @classmethod
    def of(cls, loader: Any, replicas: int, accumulated: int) -> GlobalBatch | None:
        """What a dataloader says; None where it does not say its batch size."""
        rows = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        return cls(replicas=replicas, rows=rows, accumulated=accumulated) if isinstance(rows, int) else None

    @property
    def total(self) -> int:
        """All rows."""
        return self.replicas * self.rows * self.accumulated

    def __str__(self) -> str:
        return f"{self.total} rows ({self.replicas} replicas x {self.rows} rows x {self.accumulated} batches)"


def describe_change(saved: Mapping[str, int] | None, now: GlobalBatch | None) -> str | None:
    """A sentence where both are known and differ; `saved` has the fields of a GlobalBatch."""
    if not saved or now is None or GlobalBatch(**saved).total == now.total:
        return None
    return (
        f"the checkpoint was saved with {GlobalBatch(**saved)} per optimizer step, this fit has {now}: steps, epochs "
        "and schedules go on by batches and are not converted, so keep the number of rows to see the same samples"
    )
