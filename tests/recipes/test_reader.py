"""`lightning-afd ... | head`: a command ends quietly when nobody reads its output any more."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from lightning_afd.recipes.reader import ending_with_its_reader


def unread(command: list[str], stream: str) -> tuple[int, str]:
    """Exit code of a command that cannot write to this stream, and what it writes to the other one."""
    other = "stderr" if stream == "stdout" else "stdout"
    reader, writer = os.pipe()
    os.close(reader)
    streams = {stream: writer, other: subprocess.PIPE}
    try:
        done = subprocess.run([sys.executable, *command], **streams, text=True, timeout=120)  # type: ignore[call-overload]
    finally:
        os.close(writer)
    return done.returncode, getattr(done, other)


@pytest.mark.parametrize("arguments", [["--help"], ["pretrain", "--help"], ["plan", "--cfg", "job"]])
def test_a_command_whose_reader_is_gone_says_nothing(arguments: list[str]) -> None:
    command = ["-m", "lightning_afd.recipes.cli", *arguments]
    assert unread(command, "stdout") == (128 + signal.SIGPIPE, "")


def test_a_sentence_that_nobody_reads() -> None:
    assert unread(["-m", "lightning_afd.recipes.cli", "nosuch"], "stderr") == (128 + signal.SIGPIPE, "")


def test_what_python_would_say() -> None:
    code, said = unread(["-c", "print('x')"], "stdout")
    assert code != 0 and "BrokenPipeError" in said


def test_another_broken_pipe_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError), ending_with_its_reader():
        ours.sendall(b"x")
