"""Connections of a rank are its own: processes that it forks, such as a DataLoader's workers, close what they inherit.

The other ranks notice that a rank has stopped by its sockets. Each copy in a worker process would keep them open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/dev/fd"


class OwnSockets:
    """The sockets that were opened within `opening()`; each process that is forked from now on closes them."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}
        os.register_at_fork(after_in_child=self._close)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around what connects this rank, also where it fails."""
        before = _open_sockets()
        try:
            yield
        finally:
            self._inodes.update(_open_sockets().items() - before.items())

    def _close(self) -> None:
        """Number and inode must be known: a number may belong to something else by now."""
        now = _open_sockets() if self._inodes else {}
        for number, _ in self._inodes.items() & now.items():
            with suppress(OSError):
                os.close(number)


def _open_sockets() -> dict[int, int]:
    """Inode of each open socket of this process by its file descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
