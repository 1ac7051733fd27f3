"""Numbers in a document such as docs/benchmarks.md: each run replaces what stands between its two marks."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_afd.bench.picture import draw
from lightning_afd.bench.result import Result
from lightning_afd.bench.tables import markdown
from lightning_afd.errors import PlanError


def check_docs(file: Path, name: str) -> None:
    """Raise PlanError where a Markdown file has no place for the numbers of this name."""
    begin, end = _marks(name)
    try:
        text = file.read_text()
    except OSError as error:
        raise PlanError(f"docs={file} can't be read: {error.strerror}") from error
    if not _place(name).search(text):
        raise PlanError(f"docs={file} has no lines `{begin}` and `{end}` for the numbers to stand between")


def write_docs(result: Result, file: Path, name: str) -> None:
    """Put the tables of a run into a Markdown file, and its picture beside it; raises PlanError like `check_docs`."""
    check_docs(file, name)
    begin, end = _marks(name)
    picture = file.with_name(f"{file.stem}_{name}.png")
    draw(result, picture)
    text = f"{begin}\n\n![{name}]({picture.name})\n\n{markdown(result)}\n{end}"
    file.write_text(_place(name).sub(lambda _: text, file.read_text()))


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- numbers: {name} -->", "<!-- end of numbers -->"


def _place(name: str) -> re.Pattern[str]:
    begin, end = _marks(name)
    return re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
