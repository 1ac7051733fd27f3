"""Strategies side by side on one's own ranks: `lightning-afd bench [bench=choice] [key=value]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_afd.errors import AFDError
from lightning_afd.recipes.launch import check_given, compose, external_rank, fail

SETTINGS_FILE = "settings.json"


def main() -> None:
    """Compose and make the run that the command line asks for; under torchrun or srun as one of its ranks."""
    if external_rank():
        sys.argv += ["hydra.run.dir=.", "hydra/hydra_logging=none"]  # rank 0 owns the output directory
    compose(_job, "bench")


def _job(config: DictConfig) -> None:
    from lightning_afd.bench.settings import Settings

    try:
        check_given(config)
        values: Any = OmegaConf.to_container(config, resolve=True)
        settings = Settings.read({**values, "command": _command()})
        code = _run(settings)
    except AFDError as error:
        fail(str(error), 1)
    if code:
        sys.exit(code)


def _run(settings: Any) -> int:
    """The exit code."""
    if external_rank() is not None:
        from lightning_afd.bench.rank import run, show

        result = run(settings)
        if result is not None:
            show(result, settings)
        return 0
    from lightning_afd.bench.start import Start, start

    folder = Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SETTINGS_FILE
    file.write_text(json.dumps(settings.as_dict(), indent=1))
    command = [sys.executable, "-m", "lightning_afd.bench.rank", str(file)]
    return start(Start(command=command, world=settings.world, logs=folder, namespaces=bool(settings.rates)))


def _command() -> str:
    return " ".join(["lightning-afd bench", *sys.argv[1:]])


if __name__ == "__main__":
    main()
