"""Reduces of gradients that wait for a gap between transfers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action


def makes_gradients(action: Action) -> bool:
    """Whether an action adds to gradients of parameters."""
    return action.phase in "bw" and action.op in "AET"


@dataclass
class Unreduced:
    """What is left to reduce of a layer."""

    action: Action
    """The one that completed its gradients."""
    worker: Worker
    asked: float
    """When they were complete."""
    left: float
    """Seconds."""


class Backlog:
    """Layers whose gradients are complete, by the machine that reduces them."""

    def __init__(self, programs: Mapping[Worker, Iterable[Action]]) -> None:
        self._to_come = Counter(
            (worker, action.layer)
            for worker, program in programs.items()
            for action in program
            if makes_gradients(action)
        )
        self._layers: dict[Worker, deque[Unreduced]] = defaultdict(deque)

    def completes(self, worker: Worker, action: Action) -> bool:
        """Count an action that has been executed; whether it was the last one for its layer's gradients."""
        if not makes_gradients(action):
            return False
        self._to_come[worker, action.layer] -= 1
        return not self._to_come[worker, action.layer]

    def add(self, machine: Worker, layer: Unreduced) -> bool:
        """Put a layer behind those of its machine; whether it is the only one."""
        self._layers[machine].append(layer)
        return len(self._layers[machine]) == 1

    def first(self, machine: Worker) -> Unreduced:
        """The layer whose turn it is."""
        return self._layers[machine][0]

    def take(self, machine: Worker, longest: float) -> float:
        """Take a chunk of at most so many seconds (but for rounding) from the first layer; returns its seconds."""
        layer = self.first(machine)
        if layer.left <= longest * (1 + 1e-9):
            return self._layers[machine].popleft().left
        layer.left -= longest
        return longest

    def waits(self, machine: Worker) -> bool:
        """Whether anything is left."""
        return bool(self._layers[machine])
