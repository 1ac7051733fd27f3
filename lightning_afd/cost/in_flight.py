"""How much a worker keeps between a forward and its backward: of a schedule exactly, of its numbers from above."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.shape import Shape

Change = Callable[[Action], float]
"""By how much an action changes what its worker holds."""


def peak(program: Iterable[Action], change: Change) -> float:
    """The most that a worker holds at once while it executes its program, in the unit of `change`."""
    held = most = 0.0
    for action in program:
        held += change(action)
        most = max(most, held)
    return most


def pipelined(shape: Shape, place: int, run: int) -> int:
    """The most forwards that worker number `place` (A0 F0 A1 F1 ...) holds under af-pipe with runs of `run`.

    (v - 1) run + 2 (P' - place) + 1, at most all v R, where v are the rounds of the ring and P' the place of the tail;
    the tail itself comes on top of it. `in_flight` of a schedule counts the same exactly.
    Derivation: in slots of the ring the j-th forward of a place is not before place + j, and its j-th backward is at
    (v - 1) run + 2 P' - place + j. That is interleaved 1F1B's (v - 1) G + 2 (P - place) (Narayanan et al., 2104.04473)
    with G = run. Workers behind the tail's place have one round less.
    """
    rounds = -(-shape.layers // shape.depth)
    turn = 2 * ((shape.layers - 1) % shape.depth) + 2
    return min(rounds * shape.micro_batches, (rounds - 1) * run + max(0, 2 * (turn - place) + 1))
