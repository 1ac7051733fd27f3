"""Ranks of a run: how they are started, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from namespaced import needs_namespaces

from lightning_afd.bench.start import Start, start

TALK = """
import os, socket
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as server:
        server.accept()[0].sendall(b"hello")
else:
    while True:
        try:
            print(socket.create_connection(place).recv(100).decode(), os.environ["WORLD_SIZE"])
            break
        except ConnectionRefusedError:
            pass
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("it broke")
time.sleep(1000)
"""
SHAPE = """
import os, subprocess
from lightning_afd.bench.start import ask_for_rate
shape = ask_for_rate()
assert (shape is None) == (os.environ["RANK"] == "1")
if shape is not None:
    for rate in ("200mbit", "unshaped", "300mbit"):
        shape(rate)
        print(rate, b"tbf" in subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True).stdout)
"""
PARENT = """
import sys
from pathlib import Path
from lightning_afd.bench.start import Start, start
sys.exit(start(Start(command=[sys.executable, "-c", sys.argv[1]], world=2, logs=Path("."))))
"""
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


def begin(program: str, folder: Path, **options: bool) -> int:
    return start(Start(command=[sys.executable, "-c", program], world=2, logs=folder, patience=0.1, **options))


def test_ranks_find_each_other(tmp_path: Path) -> None:
    assert begin(TALK, tmp_path) == 0
    assert (tmp_path / "rank1.log").read_text() == "hello 2\n"


def test_the_first_rank_that_fails_ends_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert begin(FAIL, tmp_path) == 1
    assert capsys.readouterr().err == "rank 1 ended first, with exit code 1\nit broke\n"


@needs_namespaces
def test_rank_0_changes_the_rate_of_links(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert begin(SHAPE, tmp_path, namespaces=True) == 0, (tmp_path / "rank1.log").read_text()
    assert capfd.readouterr().out.splitlines() == ["200mbit True", "unshaped False", "300mbit True"]


def test_sigterm_ends_the_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, WAIT]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=_importing()) as parent:
        assert parent.stdout is not None
        rank_0 = int(parent.stdout.readline())
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(rank_0, 0)


def _importing() -> dict[str, str]:
    """This tree, from any folder."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
