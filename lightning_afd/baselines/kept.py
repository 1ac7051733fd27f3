"""Bytes that a collocated rank keeps between forward and backward, action by action."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_afd.cost.job import Job
from lightning_afd.cost.memory import activation_change
from lightning_afd.placement import ROLES, Role
from lightning_afd.schedule.actions import Action


class Kept:
    """What actions of a job add to and take from the activations of its ranks.

    `whole`: of each layer its input only, until it is computed again just before its backward; the tail is not.
    """

    def __init__(self, job: Job, *, whole: bool) -> None:
        self._job, self._whole = job, whole
        self._last = "w" if job.choices.split_attention else "b"
        self._changes = {role: activation_change(job, role) for role in ROLES}
        self._row = job.batch.tokens * job.model.hidden * job.choices.precision.stream_width

    def through(self, program: Iterable[Action], role: Role) -> tuple[float, float]:
        """The change from the first to the last action of a program, and the most in between."""
        held = most = 0.0
        for action in program:
            for change in self._steps(action, role):
                held += change
                most = max(most, held)
        return held, most

    def _steps(self, action: Action, role: Role) -> tuple[float, ...]:
        change = self._changes[role]
        if not self._whole or action.op not in "AE" or action.layer == len(self._job.model.moe):
            return (change(action),)
        inputs = self._row * len(self._job.model.segments[action.layer].layers) if role == "A" else 0.0
        if action.phase == "f":
            return (inputs,)
        forward = (change(replace(action, phase="f")),) if action.phase == "b" else ()
        last = action.phase == (self._last if role == "A" else "w")
        return (*forward, change(action), -inputs if last else 0.0)
