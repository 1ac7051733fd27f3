"""The division of one group as a mixed-integer linear program; the only module that calls PuLP.

The step time T = max(need / capacity) is not linear in the sizes, but with theta = 1 / T the conditions
capacity >= need x theta are, and largest theta is least T, exactly. Each size is a column of its own (0 or 1).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import pulp

from lightning_afd.allocate.division import Division, Size, Split
from lightning_afd.errors import PlanError

Solver = Literal["auto", "highs", "cbc"]
TOLERANCE = 1e-4
"""Step times that differ by less than this part are ties."""


def solve(division: Division, solver: Solver = "auto") -> Split:
    """The best division; raises PlanError if there is none.

    Ties in T go to fewest ranks (the highest MFU over used ranks), then to the least sum of busy shares (the most slack
    in what is not the bottleneck), then to fewest attention ranks, then to fewest NICs of attention and of experts.
    """
    program = _Program(division, solver)
    theta = program.maximise(program.theta, TOLERANCE)
    program.minimise(program.ranks(), 0.5)
    program.minimise(program.busy(theta), 1e-6)
    program.minimise(program.order(division.nics), 0.5)
    attention, ffn = program.attention.chosen(), program.ffn.chosen()
    nics = program.nics[0].chosen().ranks, program.nics[1].chosen().ranks
    return Split(
        attention=attention.ranks,
        ffn=ffn.ranks,
        attention_nics=nics[0],
        ffn_nics=nics[1],
        seconds=division.seconds(attention, ffn, nics),
    )


def solvers() -> tuple[Solver, ...]:
    """What can solve here, best first."""
    return ("highs", "cbc") if find_spec("highspy") else ("cbc",)


class _OneOf:
    """A choice of one size out of a list: a column of 0 or 1 for each."""

    def __init__(self, problem: Any, name: str, sizes: Sequence[Size]) -> None:
        self.sizes = sizes
        self.columns = [problem.add_variable(f"{name}{index}", cat="Binary") for index in range(len(sizes))]
        problem += pulp.lpSum(self.columns) == 1

    def sum(self, value: Callable[[Size], float]) -> Any:
        return pulp.lpSum(value(size) * column for size, column in zip(self.sizes, self.columns, strict=True))

    def count(self) -> Any:
        return self.sum(lambda size: size.ranks)

    def chosen(self) -> Size:
        values = [column.value() or 0.0 for column in self.columns]
        return self.sizes[values.index(max(values))]


class _Program:
    """The linear program of a division; time is in units of what no division can beat."""

    def __init__(self, division: Division, solver: Solver) -> None:
        self._problem = pulp.LpProblem("division")
        self._solver = _solver(solver)
        self.attention = _OneOf(self._problem, "M", division.attention)
        self.ffn = _OneOf(self._problem, "N", division.ffn)
        nics = [Size(ranks=count, capacity=count) for count in range(1, division.nics)]
        self.nics = _OneOf(self._problem, "Ma", nics), _OneOf(self._problem, "Mf", nics)
        self.theta = self._problem.add_variable("theta", lowBound=0)
        needs = division.needs
        work = (needs.attention, needs.ffn, needs.attention_nic, needs.ffn_nic)
        parts = (self.attention, self.ffn, *self.nics)
        unit = max(need / max(s.capacity for s in part.sizes) for need, part in zip(work, parts, strict=True))
        self._needs = [(need / unit, part) for need, part in zip(work, parts, strict=True)]
        self._limit(division)

    def _limit(self, division: Division) -> None:
        for need, part in self._needs:
            self._problem += part.sum(lambda size: size.capacity) >= need * self.theta
        self._problem += self.ranks() <= division.ranks
        self._problem += self.attention.count() <= self.ffn.sum(lambda size: size.most_attention)
        self._problem += self.nics[0].count() + self.nics[1].count() <= division.nics
        if division.nics_per_rank:
            for side, nics in zip((self.attention, self.ffn), self.nics, strict=True):
                self._problem += nics.count() <= division.nics_per_rank * side.count()

    def ranks(self) -> Any:
        return self.attention.count() + self.ffn.count()

    def busy(self, theta: float) -> Any:
        """Busy shares of all four parts, at a fixed step time."""
        return pulp.lpSum(need * theta * part.sum(lambda size: 1 / size.capacity) for need, part in self._needs)

    def order(self, base: int) -> Any:
        """One number for attention ranks, NICs of attention and NICs of experts, compared in this order."""
        attention, ffn = (nics.count() for nics in self.nics)
        return base * base * self.attention.count() + base * attention + ffn

    def maximise(self, what: Any, tolerance: float) -> float:
        value = -self._best(-1 * what)
        self._problem += what >= value / (1 + tolerance)
        return value

    def minimise(self, what: Any, tolerance: float) -> float:
        """Find the least value, and keep to it from now on."""
        value = self._best(what)
        self._problem += what <= value + tolerance
        return value

    def _best(self, what: Any) -> float:
        self._problem.setObjective(what)
        status = self._problem.solve(self._solver)
        if pulp.LpStatus[status] != "Optimal":
            raise PlanError("no division keeps to the limits of ranks, NICs and memory: use more ranks or fewer groups")
        return float(pulp.value(what))


def _solver(name: Solver) -> Any:
    if name == "auto":
        name = solvers()[0]
    if name not in solvers():
        raise PlanError("solver=highs needs highspy: pip install 'lightning-afd[highs]', or use solver=cbc")
    if name == "highs":
        _greet_nobody()
        return pulp.HiGHS(msg=False, gapRel=0)
    with warnings.catch_warnings():  # that PuLP 4 will have no bundled CBC; we need 3
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(msg=False, gapRel=0)


def _greet_nobody() -> None:
    """HiGHS writes a banner to the process's standard output when its first instance is made, whatever its options."""
    import highspy

    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
