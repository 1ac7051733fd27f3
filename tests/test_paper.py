"""docs/paper.md holds what the code says today: its quick sections are made again and compared."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The package of the benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    importlib.import_module("paper.choices")
    importlib.import_module("paper.shares")
    yield sys.modules["paper"]
    for name in [name for name in sys.modules if name == "paper" or name.startswith("paper.")]:
        del sys.modules[name]


def test_quick_sections_are_up_to_date(paper: object) -> None:
    text = (ROOT / "docs" / "paper.md").read_text()
    sections = [paper.shares.figure_3(), paper.shares.figure_6(), paper.choices.figure_14()]  # type: ignore[attr-defined]
    for section in sections:
        assert section.text() in text, f"{section.title}: run python benchmarks/paper_figures.py"


def test_report_has_all_pictures() -> None:
    text = (ROOT / "docs" / "paper.md").read_text()
    for name in ("speed", "shares", "ratio", "flowmoe"):
        assert f"(paper_{name}.png)" in text
        assert (ROOT / "docs" / f"paper_{name}.png").stat().st_size > 10_000
