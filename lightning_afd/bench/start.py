"""Start the ranks of a run on this machine, plainly or one per network namespace, and end them however it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_afd.bench.conditions import Condition, parse_condition
from lightning_afd.bench.namespaces import Network, check_possible, network
from lightning_afd.errors import PlanError

CONTROL, CORE = "AFD_BENCH_CONTROL", "AFD_BENCH_CORE"
"""Variables of a rank: the file number by which it asks for link rates, and its core."""
RESULT_FILE = "bench.json"
LOOK = 0.1
MOMENT = 0.01
"""Seconds in which a slowed rank runs for its share and is stopped for the rest."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is started."""

    command: Sequence[str]
    """That of every rank."""
    world: int
    logs: Path
    """Folder for what ranks other than the first one print."""
    namespaces: bool = False
    """Whether each rank gets a network namespace of its own."""
    patience: float = 5.0
    """Seconds that ranks get to end by themselves after the first one has failed."""


def start(what: Start) -> int:
    """Run all ranks to their end; the exit code of the first one that failed, or 0.

    Raises PlanError where namespaces are asked for and cannot be made.
    """
    with ExitStack() as stack:
        net = stack.enter_context(_network(what.world)) if what.namespaces else None
        ours, theirs = socket.socketpair()
        stack.enter_context(closing(ours))
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        stack.enter_context(_ending_on_sigterm())
        with theirs:
            start_ranks = _Starter(what, net, theirs)
            ranks += (start_ranks.one(rank) for rank in range(what.world))
        conditions = stack.enter_context(_Conditions(net, ranks))
        failed = _supervise(ranks, ours, conditions)
        if failed is None:
            return 0
        _wait_a_little(ranks, what.patience)
        code = _code(ranks[failed].returncode)
        _tell(failed, code, what.logs)
        return code


@contextmanager
def _network(hosts: int) -> Iterator[Network]:
    try:
        check_possible()
    except PlanError as error:
        raise PlanError(f"{error}; rates=[] measures the network as it is") from None
    with network(hosts) as net:
        yield net


class _Starter:
    """Starts one rank after another."""

    def __init__(self, start: Start, net: Network | None, control: socket.socket) -> None:
        self._start, self._net, self._control = start, net, control
        self._shared = {} if net else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def one(self, rank: int) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl+C reaches this process only, which ends the ranks."""
        net, command = self._net, list(self._start.command)
        own = self._shared | _own(rank, self._start.world)
        if net is not None:
            own |= net.environment(net.hosts[rank])
            command = net.hosts[rank].command(command)
        if rank:
            with _log(self._start.logs, rank).open("wb") as log:
                return self._popen(command, own, stdout=log, stderr=log)
        if net is not None:
            own[CONTROL] = str(self._control.fileno())
        return self._popen(command, own, pass_fds=(self._control.fileno(),))

    @staticmethod
    def _popen(command: Sequence[str], own: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True, **streams)


def _own(rank: int, world: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    own["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # addresses without names are no news
    return own | ({CORE: str(cores[rank])} if world <= len(cores) else {})


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _supervise(ranks: Sequence[subprocess.Popen[bytes]], control: socket.socket, conditions: _Conditions) -> int | None:
    """Wait for all, or the first one that fails, and set link rates meanwhile; returns its number."""
    listening = [control]
    while True:
        running = any(rank.poll() is None for rank in ranks)
        failed = next((number for number, rank in enumerate(ranks) if rank.poll()), None)
        if failed is not None or not running:
            return failed
        readable, _, _ = select.select(listening, [], [], LOOK)
        if readable and not _answer(control, conditions):
            listening = []  # rank 0 has closed it


def _answer(control: socket.socket, conditions: _Conditions) -> bool:
    """Do what rank 0 asks for; False once it has nothing more to say."""
    asked = control.recv(200).decode()
    if asked:
        conditions.set(parse_condition(asked))
        control.sendall(b"done")
    return bool(asked)


class _Conditions:
    """Link rates, and a rank that is stopped for a part of each moment: a slow machine, its network included."""

    def __init__(self, net: Network | None, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        self._net, self._ranks = net, ranks
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def set(self, condition: Condition) -> None:
        """From now on."""
        self._stop()
        net = self._net
        if net is not None:
            net.shape(condition.rate)
            if condition.rank is not None and condition.its_rate is not None:
                net.shape(condition.its_rate, only=net.hosts[condition.rank])
        if condition.rank is not None and condition.its_share < 1:
            arguments = self._ranks[condition.rank], condition.its_share
            self._over.clear()
            self._thread = threading.Thread(target=self._slow_down, args=arguments, daemon=True)
            self._thread.start()

    def _slow_down(self, rank: subprocess.Popen[bytes], share: float) -> None:
        while not self._over.wait(MOMENT * share):
            rank.send_signal(signal.SIGSTOP)
            self._over.wait(MOMENT * (1 - share))
            rank.send_signal(signal.SIGCONT)

    def _stop(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> _Conditions:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _wait_a_little(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(LOOK)


def _tell(rank: int, code: int, logs: Path) -> None:
    """Who ended first, and the end of its log; rank 0 has shown its own."""
    text = _log(logs, rank).read_text(errors="replace").strip() if rank else ""
    sys.stderr.write(f"rank {rank} ended first, with exit code {code}\n{text[-4000:]}{chr(10) if text else ''}")


def _code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM becomes SystemExit, so that ranks are ended."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def ask_for_rate(environment: Mapping[str, str] = os.environ) -> Callable[[str], None] | None:
    """On rank 0: how link rates are changed; None where the network is what it is."""
    if CONTROL not in environment:
        return None
    control = socket.socket(fileno=int(environment[CONTROL]))

    def shape(rate: str) -> None:
        control.sendall(rate.encode())
        control.recv(200)

    return shape
