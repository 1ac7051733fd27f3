"""Lightning's launcher of the other ranks of this host, with another watch over them.

Lightning's own observer kills all processes, itself included, as soon as it sees that one has ended: nobody then says
why. This one tells the ranks, which name the first cause and stop by themselves, and kills only what is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_afd.namespace import SubprocessScriptLauncher, namespace_of

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

PERIOD = 0.5
PATIENCE = 25.0
"""Seconds in which a job whose ranks have been told stops by itself."""

Tell = Callable[[int, int], bool]
"""Called with local rank and exit code; whether the other ranks could be told."""


class WatchingLauncher(SubprocessScriptLauncher):
    """Starts the ranks of this host as Lightning does."""

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, tell: Tell) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._tell = tell

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=watch_children, args=(self.procs, self._tell), daemon=True).start()
        distributed = namespace_of(self).fabric("utilities.distributed")
        distributed._set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def watch_children(children: Sequence[subprocess.Popen[bytes]], tell: Tell) -> None:
    """Until all have ended well; where one has not, the job ends, at the latest after `PATIENCE` seconds."""
    while (failed := _failed(children)) is None:
        if all(child.returncode == 0 for child in children):
            return
        time.sleep(PERIOD)
    local_rank, code = failed
    told = tell(local_rank, code)
    if told:  # this process ends with the first cause; this thread, a daemon, with it
        time.sleep(PATIENCE)
    for child in children:
        child.kill()
    reason = "and the job did not stop by itself" if told else "while no step was run, see its output above"
    sys.stderr.write(f"local rank {local_rank} ended with {describe_exit(code)}, {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def _failed(children: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    for local_rank, child in enumerate(children, start=1):
        if child.poll():
            assert child.returncode is not None
            return local_rank, child.returncode
    return None


def describe_exit(code: int) -> str:
    """`exit code 1`, or `signal SIGKILL` for a process that was killed."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
