"""Lightning's launcher of the other ranks of this host, with another watch over them.

Lightning's own observer kills all processes, itself included, as soon as it sees that one has ended: nobody then says
why. This one tells the ranks, which name the first cause and stop by themselves, and kills only what is left. The other
ranks watch the process that has started them: where it ends, nobody else would end them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_afd.namespace import SubprocessScriptLauncher, namespace_of

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

PERIOD = 0.5
PATIENCE = 25.0
"""Seconds in which a job whose ranks have been told stops by itself."""

_STARTED_BY = "LIGHTNING_AFD_STARTED_BY"
"""Environment variable of the ranks that are started here: the id of the process that has started them."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What a launcher asks its strategy."""

    tell: Callable[[int, int], bool]
    """Called with local rank and exit code of a process that has ended; whether the other ranks could be told."""
    begins: Callable[[Any], None]
    """Called with the Trainer before a fit, a test or a prediction."""
    met: Callable[[], bool]
    """Whether the ranks are, or were, connected, so that each one notices by itself when another one stops."""


class WatchingLauncher(SubprocessScriptLauncher):
    """Starts the ranks of this host as Lightning does."""

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, ranks: Ranks) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._ranks = ranks

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        over = threading.Event()
        self._ranks.begins(trainer)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            _in_background(watch_children, self.procs, self._ranks.tell, over)
        elif parent := os.environ.get(_STARTED_BY):
            _in_background(watch_parent, int(parent), self._ranks.met, over)
        distributed = namespace_of(self).fabric("utilities.distributed")
        distributed._set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            made = function(*args, **kwargs)
        except BaseException:
            if not self._ranks.met():  # the others wait for this rank, and nothing else would tell them
                over.set()
                self._end_children()
            raise
        if not self.procs:
            over.set()
        return made

    @override
    def _call_children_scripts(self) -> None:
        os.environ[_STARTED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[_STARTED_BY]

    def _end_children(self) -> None:
        for child in self.procs:
            child.kill()
        for child in self.procs:
            child.wait()


def _in_background(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def watch_children(
    children: Sequence[subprocess.Popen[bytes]], tell: Callable[[int, int], bool], over: threading.Event
) -> None:
    """Until all have ended well; where one has not, the job ends, at the latest after `PATIENCE` seconds."""
    while (failed := _failed(children)) is None:
        if all(child.returncode == 0 for child in children) or over.wait(PERIOD):
            return
    local_rank, code = failed
    told = tell(local_rank, code)
    if told:  # this process ends with the first cause; this thread, a daemon, with it
        time.sleep(PATIENCE)
    for child in children:
        child.kill()
    reason = "and the job did not stop by itself" if told else "while no step was run, see its output above"
    _leave(f"local rank {local_rank} ended with {describe_exit(code)}, {reason}")


def watch_parent(parent: int, met: Callable[[], bool], over: threading.Event) -> None:
    """Until this rank's work is over; where the process that has started it ends before, this rank ends as well.

    Ranks that have met learn the first cause from their connections: they get `PATIENCE` seconds to say it.
    """
    while os.getppid() == parent:
        if over.wait(PERIOD):
            return
    if not over.wait(PATIENCE if met() else 0.0):
        _leave(f"local rank 0 (process {parent}), which has started this rank, has ended")


def _leave(last_words: str) -> None:
    sys.stderr.write(f"{last_words}\n")
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
