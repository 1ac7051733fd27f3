"""How a plan is made at the start of a fit."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_afd.namespace import MisconfigurationException


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How long to measure, and what cannot be found out without reading data."""

    budget_seconds: float = 60.0
    """For all measurements together, at most."""
    trials: int = 8
    """Layouts that are tried on real steps of a few layers of the model's shape, at most; 0: none.

    The plan's own layout is the first of them; they end with the budget.
    """
    tolerance: float = 0.02
    """A tried layout is better if a row takes less time by more than this part."""
    repetitions: int = 2
    """Steps by which a layout is timed, behind a first one; the fastest counts."""
    rows: int = 0
    """Rows of a batch; 0: those of the training dataloader."""
    tokens: int = 0
    """Tokens of a row; 0: those of the first rows of its dataset.

    To be given where the dataset can't be read by index, as nothing is taken out of a stream for planning.
    """

    def __post_init__(self) -> None:
        for name in ("trials", "rows", "tokens", "tolerance"):
            if getattr(self, name) < 0:
                raise MisconfigurationException(f"planning.{name}={getattr(self, name)}: choose 0 or more")
        if self.budget_seconds <= 0 or self.repetitions < 1:
            raise MisconfigurationException(
                f"planning with budget_seconds={self.budget_seconds} and repetitions={self.repetitions}: some time and "
                "at least 1 repetition are needed, or plan='none'"
            )
