"""The child side of the test pool: one process that runs the jobs of one rank after another.

Nothing heavy is imported at the top, so that thread counts are set before torch is loaded.
"""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from types import ModuleType
from typing import Any

CLEAN = b"clean"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one rank has to do: where the function is, its pickled arguments, and the environment it sees."""

    file: str
    module: str
    qualname: str
    arguments: bytes
    environment: dict[str, str]
    timeout: float
    "Seconds after which the stacks of all threads are written to the stack file."


@dataclass(frozen=True, slots=True)
class RemoteError:
    """What went wrong on one rank: class name and text of the exception, and its formatted traceback."""

    type_name: str
    message: str
    traceback: str = ""


def worker_main(connection: Connection, log_path: str, stack_path: str, preload: tuple[str, ...]) -> None:
    """Import what most jobs need, then serve jobs until the parent closes the pipe; all output goes to the log file."""
    os.setsid()  # a group of its own: the parent's kill reaches what a job has started, too
    _redirect_output(log_path)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in preload:
        _preload(name)
    connection.send_bytes(b"ready")
    with open(stack_path, "w") as stack_file:
        try:
            while True:
                _serve_one(connection, pickle.loads(connection.recv_bytes()), stack_file)
        except (EOFError, OSError, KeyboardInterrupt):
            os._exit(0)


def _serve_one(connection: Connection, job: Job, stack_file: Any) -> None:
    saved = dict(os.environ), os.getcwd(), warnings.filters[:]
    os.environ.update(job.environment)
    _reset_torch()
    # A timer thread and not a signal: Lightning's trainers put the default signal handlers back.
    faulthandler.dump_traceback_later(job.timeout, file=stack_file)
    answer = _execute(job)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(pickle.dumps(answer))
    if not isinstance(answer, RemoteError):
        # A rank that is done early must not take the store or its sockets away from the others. One that failed
        # must, at once: that is what releases the ranks that wait for it.
        connection.recv_bytes()
    _clean_up(*saved)
    connection.send_bytes(CLEAN)


def _execute(job: Job) -> bytes | RemoteError:
    try:
        function = load_function(job.file, job.module, job.qualname)
        return pickle.dumps(function(*pickle.loads(job.arguments)))
    except BaseException as error:
        return RemoteError(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def load_function(file: str, module: str, qualname: str) -> Callable[..., Any]:
    """Return the function, from its module if that can be imported here, else by loading the file under that name."""
    target: Any = _load_module(file, module)
    for name in qualname.split("."):
        target = getattr(target, name)
    return target  # type: ignore[no-any-return]


def _load_module(file: str, module: str) -> ModuleType:
    if module in sys.modules:
        return sys.modules[module]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is not None and found.origin is not None and Path(found.origin).samefile(file):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


def _clean_up(environment: dict[str, str], folder: str, filters: list[Any]) -> None:
    import torch.distributed as dist

    gc.collect()  # groups held by a reference cycle would keep their sockets open
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    warnings.filters[:] = filters  # type: ignore[index]
    _reset_torch()
    gc.collect()


def _reset_torch() -> None:
    import numpy
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _preload(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception:  # the job that needs it reports it; the others still run
        traceback.print_exc()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
