"""Strategies side by side on one's own ranks: `lightning-afd bench [bench=choice] [key=value]`."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_afd.bench.docs import check_docs
from lightning_afd.bench.registry import resolve
from lightning_afd.bench.report import show
from lightning_afd.bench.result import Result
from lightning_afd.bench.settings import Settings
from lightning_afd.bench.start import RESULT_FILE, Start, start
from lightning_afd.errors import AFDError, PlanError
from lightning_afd.recipes.launch import check_given, compose, external_rank, fail

SETTINGS_FILE = "settings.json"


def main() -> None:
    """Compose and make the run that the command line asks for; under torchrun or srun as one of its ranks."""
    if external_rank():
        sys.argv += ["hydra.run.dir=.", "hydra/hydra_logging=none"]  # rank 0 owns the output directory
    compose(_job, "bench")


def _job(config: DictConfig) -> None:
    try:
        check_given(config)
        values: Any = OmegaConf.to_container(config, resolve=True)
        settings = Settings.read({**values, "command": _command()})
        for name in settings.contenders:
            resolve(name)
        if settings.docs is not None and not config.parts:
            check_docs(Path(settings.docs), settings.docs_name)
        code = _one_by_one(settings.output_dir, config.parts) if config.parts else _run(settings)
    except AFDError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)
    if code:
        sys.exit(code)


def _command() -> str:
    """What was typed, without the places that results go to."""
    given = [argument for argument in sys.argv[1:] if not argument.startswith(("hydra.", "hydra/", "docs="))]
    return shlex.join(["lightning-afd", "bench", *given])


def _one_by_one(folder: str, names: list[str]) -> int:
    """Run other choices of this command, each in a folder of its own; the exit code of the first one that failed."""
    given = [argument for argument in sys.argv[1:] if not argument.startswith(("bench=", "parts=", "hydra.run.dir="))]
    codes = []
    for name in names:
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "lightning_afd.recipes.cli", "bench", f"bench={name}", *given]
        codes.append(subprocess.run([*command, f"hydra.run.dir={Path(folder) / name}"]).returncode)
    return next((code for code in codes if code), 0)


def _run(settings: Settings) -> int:
    """The exit code."""
    runs = settings.by_world()
    if external_rank() is not None:
        return _as_rank(settings, runs)
    folder, found = Path(settings.output_dir), []
    for number, run in enumerate(runs):
        own = folder / f"ranks{number}" if len(runs) > 1 else folder
        if code := _start(replace(run, output_dir=str(own)), own):
            return code
        found.append(own / RESULT_FILE)
    first, *others = (Result.load(file) for file in found)
    for other in others:
        first = first.joined(other)
    show(first, settings)
    return 0


def _start(run: Settings, folder: Path) -> int:
    """Start the ranks of one run here."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SETTINGS_FILE
    file.write_text(json.dumps(run.as_dict(), indent=1))
    command = [sys.executable, "-m", "lightning_afd.bench.rank", str(file)]
    return start(Start(command=command, world=run.world, logs=folder, namespaces=bool(run.rates)))


def _as_rank(settings: Settings, runs: list[Settings]) -> int:
    """Be one of the ranks that a launcher has started."""
    if len(runs) > 1 or settings.rates:
        raise PlanError("sweeps over attention and ffn, and rates, need a run that starts its ranks itself")
    from lightning_afd.bench.rank import run

    result = run(runs[0])
    if result is not None:
        show(result, settings)
    return 0


if __name__ == "__main__":
    main()
