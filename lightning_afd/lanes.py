"""Lanes of a simulated machine: each works on one thing after another, first come, first served."""

from __future__ import annotations

from typing import Literal

Way = Literal["compute", "send", "receive", "reduce"]


class Track:
    """What is known of a lane; times in seconds."""

    def __init__(self) -> None:
        self.free: float = 0
        """When its last turn ends."""
        self.busy: float = 0
        """All turns together."""

    def occupy(self, now: float, seconds: float) -> tuple[float, float]:
        """Start and end of the next turn."""
        start = max(now, self.free)
        self.free = start + seconds
        self.busy += seconds
        return start, self.free
