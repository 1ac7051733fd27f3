"""Jobs of several processes that are started as a user starts them, watched until the last of their processes ended."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended."""

    code: int
    """Of the process that was started; negative for a signal."""
    output: str
    """Of all processes."""
    left: tuple[int, ...]
    """Processes that had to be ended by force, as they outlived the output or the time limit."""
    in_time: bool


def run_job(command: Sequence[str], *, seconds: float = 300.0, env: Mapping[str, str] | None = None) -> Ended:
    """Run `command` with this Python in a session of its own, of which nothing is left when this returns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    job = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, in_time = "", True
    try:
        output, _ = job.communicate(timeout=seconds)  # ends when the last process that may write has ended
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        left = tuple(pid for pid in processes_of(job.pid) if not (in_time and _ends(pid)))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    if not in_time:
        output, _ = job.communicate()
    return Ended(code=job.wait(), output=output, left=left, in_time=in_time)


def _ends(pid: int) -> bool:
    """Whether a process that has closed its output ends on its own as well, which takes a moment."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 20.0)[0])
    finally:
        os.close(watched)


def processes_of(session: int) -> list[int]:
    """Processes of a session that are still there."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) == session and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                found.append(int(pid))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found
