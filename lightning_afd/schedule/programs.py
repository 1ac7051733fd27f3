"""What the ranks of a job execute in a step: their programs of a schedule, which has been checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.actions import Step
from lightning_afd.schedule.check import check, check_together
from lightning_afd.schedule.orders import DEFAULTS, Knobs, build
from lightning_afd.schedule.passes import forward_only
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.schedule.together import build_together, forward_only_together


@dataclass(frozen=True)
class Programs:
    """The steps of all ranks."""

    schedule: Schedule
    """What they do, worker by worker."""
    by_worker: Mapping[Worker, tuple[Step, ...]]
    """What a rank does, by its worker (`Layout.worker_of`)."""


def programs_of(layout: Layout, order: str, shape: Shape, knobs: Knobs = DEFAULTS) -> Programs:
    """Build an order on a layout; raises PlanError for one that is not known there."""
    return _together(order, shape, training=True) if layout.collocated else _apart(order, shape, knobs, training=True)


def evaluation_programs_of(layout: Layout, order: str, shape: Shape, knobs: Knobs = DEFAULTS) -> Programs:
    """The same for its forward phase alone."""
    return _together(order, shape, training=False) if layout.collocated else _apart(order, shape, knobs, training=False)


def _apart(order: str, shape: Shape, knobs: Knobs, *, training: bool) -> Programs:
    schedule = build(order, shape, knobs)
    schedule = schedule if training else forward_only(schedule)
    check(schedule)
    steps = {w: tuple(Step(w, action) for action in program) for w, program in schedule.programs.items()}
    return Programs(schedule, steps)


def _together(order: str, shape: Shape, *, training: bool) -> Programs:
    """All ranks of a collocated layout have the same program: a rank's first worker is the A worker."""
    together = build_together(order, shape)
    together = together if training else forward_only_together(together)
    check_together(together)
    return Programs(together.schedule, {shape.attention(0): together.program})
