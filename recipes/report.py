"""Write a page about a run that recorded steps: `lightning-afd report run=<folder>`."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from lightning_afd.recipes.launch import run_tool
from lightning_afd.report import write_report

PATHS = ("run", "out")


def main() -> None:
    """Compose and run what the command line asks for."""
    run_tool("report", run, PATHS)


def run(config: DictConfig) -> None:
    """Write the page and say where it is."""
    sys.stdout.write(f"{described(write_report(config.run, config.out, config.step))}\n")


def described(path: Path) -> str:
    """The page's path and size."""
    return f"{path} ({path.stat().st_size / 1e3:,.0f} kB)"


if __name__ == "__main__":
    main()
