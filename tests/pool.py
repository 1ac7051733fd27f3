"""Four long-living rank processes for tests: importing torch and Lightning once instead of once per test.

`pool.run(function, world, *args)` calls a module-level function on `world` ranks with the environment of torchrun and
returns the results by rank. A job that hangs or kills a process costs a restart of the pool, never a stuck test run.
"""

import atexit
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pool_worker import CLEAN, Job, RemoteError, worker_main

__all__ = ["RankErrors", "RankPool", "RemoteError", "free_port"]

PRELOAD = ("torch", "torch.distributed", "lightning.pytorch", "transformers.modeling_utils", "lightning_afd")
START_TIMEOUT = 300.0
CLEAN_UP_TIMEOUT = 20.0
STACKS_MARGIN = 0.5  # seconds that a hanging worker gets to write its stacks down


class RankErrors(Exception):
    """Some ranks of a job failed; `errors` maps each of them to its RemoteError."""

    def __init__(self, errors: dict[int, RemoteError], output: str) -> None:
        self.errors = errors
        parts = [f"rank {rank}: {error.type_name}: {error.message}" for rank, error in errors.items()]
        parts += [f"---- rank {rank} ----\n{error.traceback}" for rank, error in errors.items()]
        super().__init__("\n".join([*parts, output]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    process: BaseProcess
    connection: Connection
    log: Path
    stacks: Path

    def kill(self) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.connection.close()
        self.process.join()
        self.process.close()


class RankPool:
    """Processes are started on the first job, and again after a job that broke one of them."""

    def __init__(self, size: int, folder: Path, preload: tuple[str, ...] = PRELOAD) -> None:
        self.size = size
        self._preload = preload
        self._folder = folder
        self._processes: list[_Process] = []
        self._generation = 0
        self._log_starts: list[int] = []

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
        """Call function(*args) on ranks 0..world-1 and return the results by rank; raise RankErrors if any rank fails.

        `timeout` is in seconds and counts from the moment when all processes are up.
        """
        answers = self.try_run(function, world, *args, timeout=timeout)
        errors = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, RemoteError)}
        if errors:
            raise RankErrors(errors, self.last_output())
        return answers

    def try_run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
        """Like `run`, but return a RemoteError in the place of the result of each rank that failed."""
        if not 1 <= world <= self.size:
            raise ValueError(f"world={world} does not fit into a pool of {self.size} processes")
        jobs = [_job(function, args, environment, timeout) for environment in _environments(world)]
        self._start()
        self._log_starts = [process.log.stat().st_size for process in self._processes[:world]]
        for process, job in zip(self._processes, jobs, strict=False):
            process.connection.send_bytes(pickle.dumps(job))
        answers = self._collect(world, timeout)
        self._finish(answers)
        return [pickle.loads(answer) if isinstance(answer, bytes) else answer for answer in answers]

    def last_output(self) -> str:
        """Return what the ranks of the last job wrote to stdout and stderr (at most 8000 characters each)."""
        parts = []
        for rank, start in enumerate(self._log_starts):
            text = self._log_path(rank).read_bytes()[start:].decode(errors="replace")
            if text:
                parts.append(f"---- output of rank {rank} ----\n{text[-8000:]}")
        return "\n".join(parts)

    def stop(self) -> None:
        """End all processes; the next job starts new ones."""
        atexit.unregister(self.stop)
        while self._processes:
            self._processes.pop().kill()

    def _start(self) -> None:
        if self._processes:
            return
        self._generation += 1
        context = multiprocessing.get_context("spawn")
        atexit.register(self.stop)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            log, stacks = self._log_path(rank), self._log_path(rank).with_suffix(".stacks")
            arguments = (theirs, str(log), str(stacks), self._preload)
            child = context.Process(target=worker_main, args=arguments, name=f"rank{rank}")
            child.start()
            theirs.close()
            self._processes.append(_Process(process=child, connection=ours, log=log, stacks=stacks))
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        try:
            for process in self._processes:
                if not process.connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {START_TIMEOUT} s")
                process.connection.recv_bytes()
        except (EOFError, OSError) as error:
            logs = "\n".join(process.log.read_text() for process in self._processes)
            self.stop()
            raise RuntimeError(f"the rank processes did not start: {error!r}\n{logs}") from error

    def _collect(self, world: int, timeout: float) -> list[bytes | RemoteError]:
        """Wait for the answer of every rank: pickled result, error, or what is known about a rank without an answer."""
        answers: dict[int, bytes | RemoteError] = {}
        for rank in self._arriving(set(range(world)), timeout + STACKS_MARGIN):
            try:
                answers[rank] = pickle.loads(self._processes[rank].connection.recv_bytes())
            except (EOFError, OSError):
                answers[rank] = self._died(rank)
        return [answers[rank] if rank in answers else self._hung(rank, timeout) for rank in range(world)]

    def _finish(self, answers: list[bytes | RemoteError]) -> None:
        """Bring all ranks back to a clean state, by force where one hangs or has died."""
        if any(isinstance(answer, RemoteError) and answer.type_name in ("Died", "Hung") for answer in answers):
            self.stop()
            return
        for rank, answer in enumerate(answers):
            if isinstance(answer, bytes):
                self._processes[rank].connection.send_bytes(CLEAN)
        dirty = set(range(len(answers)))
        with contextlib.suppress(EOFError, OSError):
            for rank in self._arriving(set(dirty), CLEAN_UP_TIMEOUT):
                self._processes[rank].connection.recv_bytes()
                dirty.discard(rank)
        if dirty:
            self.stop()
            for rank in dirty:
                if isinstance(answers[rank], bytes):
                    answers[rank] = RemoteError("CleanUp", "the process group could not be destroyed after the job")

    def _arriving(self, waiting: set[int], timeout: float) -> Iterator[int]:
        """Yield each rank once, when there is something to read from it, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        by_connection = {self._processes[rank].connection: rank for rank in waiting}
        while by_connection:
            ready = wait(list(by_connection), max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                yield by_connection.pop(connection)

    def _died(self, rank: int) -> RemoteError:
        process = self._processes[rank].process
        process.join(5)
        return RemoteError("Died", f"the process of rank {rank} ended with exit code {process.exitcode}")

    def _hung(self, rank: int, timeout: float) -> RemoteError:
        if self._processes[rank].process.exitcode is not None:
            return self._died(rank)
        stacks = self._processes[rank].stacks.read_text()
        return RemoteError("Hung", f"rank {rank} was not ready after {timeout} s; its stacks are below", stacks)

    def _log_path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}-{self._generation}.log"


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environments(world: int) -> list[dict[str, str]]:
    port = str(free_port())
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "NODE_RANK": "0", "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # the name of a test machine may not resolve
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def _job(function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], timeout: float) -> Job:
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not a module-level function: other processes cannot find it")
    return Job(
        file=inspect.getfile(function),
        module=function.__module__,
        qualname=function.__qualname__,
        arguments=pickle.dumps(args),
        environment=environment,
        timeout=timeout,
    )
