"""Numbers in docs/benchmarks.md: each run replaces what stands between its two marks."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_afd.bench.result import Result
from lightning_afd.bench.tables import markdown
from lightning_afd.errors import PlanError


def write_docs(result: Result, file: Path, name: str = "strategies") -> None:
    """Put the tables of a run into a Markdown file, under a name; raises PlanError where it has no place for them."""
    begin, end = f"<!-- numbers: {name} -->", "<!-- end of numbers -->"
    try:
        text = file.read_text()
    except OSError as error:
        raise PlanError(f"docs={file} can't be read: {error.strerror}") from error
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not place.search(text):
        raise PlanError(f"docs={file} has no lines `{begin}` and `{end}` for the numbers to stand between")
    file.write_text(place.sub(lambda _: f"{begin}\n\n{markdown(result)}\n{end}", text))
