"""What one rank executes in a step: its program of a schedule, which has been checked."""

from __future__ import annotations

from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Step
from lightning_afd.schedule.check import check, check_together
from lightning_afd.schedule.orders import build
from lightning_afd.schedule.passes import forward_only
from lightning_afd.schedule.shape import Shape
from lightning_afd.schedule.together import build_together, forward_only_together


def program_apart(order: str, shape: Shape, worker: Worker, *, training: bool) -> tuple[Step, ...]:
    """The program of the ranks of a worker; raises PlanError for an unknown order."""
    schedule = build(order, shape)
    schedule = schedule if training else forward_only(schedule)
    check(schedule)
    return tuple(Step(worker, action) for action in schedule.programs[worker])


def program_together(order: str, shape: Shape, *, training: bool) -> tuple[Step, ...]:
    """The program of all ranks of a collocated layout; raises PlanError for an unknown order."""
    together = build_together(order, shape)
    together = together if training else forward_only_together(together)
    check_together(together)
    return together.program
