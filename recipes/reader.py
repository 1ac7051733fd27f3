"""A command whose output nobody reads any more, as in `lightning-afd ... | head`."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def ending_with_its_reader() -> Iterator[None]:
    """Where the reader of stdout or stderr goes away, end quietly and with the exit code that SIGPIPE gives others.

    A pipe or connection to somebody else that breaks is an error like any other.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, as Python would complain about it at exit
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not gone:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in gone:
            os.dup2(nowhere, stream.fileno())  # what is still in the buffer goes there at exit
        sys.exit(128 + signal.SIGPIPE)


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose other end has been closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
