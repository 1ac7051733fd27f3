"""From a command line to running jobs, without torch: Hydra composes and checks, each job gets a process of its own.

plain run      this process becomes the job's worker (exec), so that signals and the exit code are the job's
sweep (-m)     one worker after another; a job never runs in the sweeping process, where the second one would find
               the rank variables of the first
torchrun, srun every rank composes, rank 0 alone writes; the launcher's ranks are the workers

A worker knows nothing of Hydra's command line. Lightning starts the other ranks of the node by repeating the worker's
own command, which names the job's finished config: no rank composes again, and no rank repeats a sweep.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_afd.errors import AFDError, PlanError
from lightning_afd.recipes.explain import sentence

RECIPES = {"pretrain": "lightning_afd.recipes.pretrain"}
"""What can be launched: a name and its module, which has `main()` and `run(config)`."""

CONFIG_FILE = "config.yaml"


class Failure(NamedTuple):
    """Why a job was not run, or how it ended."""

    sentence: str
    code: int


def launch(recipe: str, check: Callable[[DictConfig], None]) -> None:
    """Run a recipe as the command line says; exit with one sentence and code 1 if a setting is wrong.

    `check` gets the composed config and raises AFDError; it is called before any process starts and torch is imported.
    A sweep goes on when one of its jobs fails, and its exit code is then that of the first one.
    """
    plain_run: list[DictConfig] = []
    failures: list[Failure] = []

    def job(config: DictConfig) -> None:
        try:
            check(config)
        except AFDError as error:
            _remove_if_empty(config.output_dir)
            failures.append(Failure(str(error), 1))
            return
        resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        assert isinstance(resolved, DictConfig)
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            plain_run.append(resolved)
        elif code := _run_worker(_worker_command(recipe, resolved)):
            failures.append(Failure(f"the job in {resolved.output_dir} ended with exit code {code}", code))

    if external_rank() is not None and {"-m", "--multirun"} & set(sys.argv):
        fail("a sweep (-m) starts the ranks of its jobs itself: run it without torchrun or srun", 1)
    if external_rank():
        sys.argv += ["hydra.run.dir=.", "hydra/hydra_logging=none"]  # rank 0 owns the output directory
    compose(job)
    if failures:
        fail("; ".join(failure.sentence for failure in failures), failures[0].code)
    for config in plain_run:  # none after --help or --cfg
        if external_rank():
            work(recipe, config)
        else:
            _become(_worker_command(recipe, config))


def compose(job: Callable[[DictConfig], None], config_name: str = "config") -> None:
    """Call `job` with what the command line makes of a config of conf/; a wrong setting ends it in one sentence."""
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise what it would print over many lines
    try:
        hydra.main(version_base="1.3", config_path="pkg://lightning_afd.conf", config_name=config_name)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        if traceback_wanted:
            raise
        fail(sentence(error), 1)


def run_tool(name: str, run: Callable[[DictConfig], None], paths: Sequence[str]) -> None:
    """Run a command that starts no job, in this process; `paths` are its settings that name files."""
    sys.argv[1:] = [quoted(argument, paths) for argument in sys.argv[1:]]

    def job(config: DictConfig) -> None:
        try:
            check_given(config)
            run(config)
        except AFDError as error:
            fail(str(error), 1)

    compose(job, name)


def quoted(argument: str, paths: Sequence[str]) -> str:
    """Quote a path for Hydra: names of checkpoints hold an = ("step=300-val_loss=2.100.ckpt")."""
    key, equals, value = argument.partition("=")
    if key not in paths or not equals or value[:1] in ("", "'", '"'):
        return argument
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def check_given(config: DictConfig) -> None:
    """Raise PlanError naming the settings that have no default and were not given."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise PlanError(f"{' and '.join(missing)} must be given: {' '.join(f'{key}=...' for key in missing)}")


def _remove_if_empty(output_dir: str) -> None:
    with contextlib.suppress(OSError):
        os.removedirs(os.path.relpath(output_dir))  # a relative path: the working directory itself stays


def fail(message: str, code: int) -> NoReturn:
    """End the command with a sentence and an exit code."""
    sys.stderr.write(f"lightning-afd: {message}\n")
    sys.exit(code)


def external_rank() -> int | None:
    """Return the global rank that torchrun, srun or the user gave this process, None if there is none."""
    variables = os.environ
    if "RANK" in variables:
        return int(variables["RANK"])
    if int(variables.get("SLURM_NTASKS", "1")) > 1 and variables.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(variables.get("SLURM_PROCID", "0"))
    if "LOCAL_RANK" in variables:
        first_node = variables.get("NODE_RANK", variables.get("GROUP_RANK", "0")) == "0"
        return int(variables["LOCAL_RANK"]) if first_node else int(variables["LOCAL_RANK"]) + 1
    return None


def _worker_command(recipe: str, config: DictConfig) -> list[str]:
    file = Path(config.output_dir) / CONFIG_FILE
    file.parent.mkdir(parents=True, exist_ok=True)  # Hydra makes its own folder only
    OmegaConf.save(config, file)
    return [sys.executable, "-m", "lightning_afd.recipes.worker", recipe, str(file)]


def _become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _run_worker(command: list[str]) -> int:
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = process.wait()
    finally:  # an interrupted sweep leaves no job behind
        if process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def work(recipe: str, config: DictConfig) -> None:
    """Run one job in this process, with the heavy imports."""
    importlib.import_module(RECIPES[recipe]).run(config)
