"""Show a result, and write it down."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from lightning_afd.bench.docs import write_docs
from lightning_afd.bench.picture import draw
from lightning_afd.bench.result import Result
from lightning_afd.bench.settings import Settings
from lightning_afd.bench.start import RESULT_FILE
from lightning_afd.bench.tables import Grid, parts

PICTURE_FILE = "bench.png"


def show(result: Result, settings: Settings) -> None:
    """Print it, and write JSON, picture and, where asked for, the tables of a document."""
    folder = Path(settings.output_dir)
    result.save(folder / RESULT_FILE)
    draw(result, folder / PICTURE_FILE)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for part in parts(result):
        console.print(part.rich() if isinstance(part, Grid) else part)
    if settings.docs is not None:
        write_docs(result, Path(settings.docs), settings.docs_name)
    console.print(f"{folder / RESULT_FILE} and {PICTURE_FILE} hold all of it.")
