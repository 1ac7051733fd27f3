"""Orders of pipeline stages: which chunk of layers a stage works on for which micro-batches, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeVar

from lightning_afd.baselines.stages import Stages
from lightning_afd.errors import PlanError

T = TypeVar("T")
Part = Literal["f", "b", "i", "w"]
"""Forward, backward, input gradients alone, weight gradients alone."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a stage does with one chunk of layers and the micro-batches that it works on together."""

    chunk: int
    part: Part
    micro_batches: tuple[int, ...]


Slot = tuple[Unit, ...]
"""Units whose layers alternate, so that transfers of one hide behind the computation of the other."""


def interleaved(stages: Stages, stage: int, together: int = 1) -> list[Slot]:
    """Interleaved 1F1B (Narayanan et al., 2104.04473, section 2.2), plain 1F1B with one chunk per stage.

    Blocks of `together` micro-batches take the place of micro-batches; with several chunks per stage their number has
    to be a multiple of the stages.
    """
    blocks = [tuple(block) for block in _runs(range(stages.micro_batches), together)]
    depth, virtual = stages.depth, stages.chunks // stages.depth
    if virtual > 1 and len(blocks) % depth:
        raise PlanError(f"{len(blocks)} micro-batches for {depth} interleaved stages: a multiple is needed")
    order = [(part, block) for run in _runs(blocks, depth) for part in range(virtual) for block in run]
    forwards = [Unit(part * depth + stage, "f", block) for part, block in order]
    backwards = [Unit((virtual - 1 - part) * depth + stage, "b", block) for part, block in order]
    ahead = min(len(order), (depth - 1 - stage) * (2 if virtual > 1 else 1) + (virtual - 1) * depth)
    steady = zip(forwards[ahead:], backwards, strict=False)
    units = [*forwards[:ahead], *(unit for pair in steady for unit in pair), *backwards[len(order) - ahead :]]
    return [(unit,) for unit in units]


def _runs(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def two_directions(stages: Stages, stage: int) -> list[Slot]:
    """DualPipe's eight phases, as in DeepSeek's published program (github.com/deepseek-ai/DualPipe).

    Needs an even number of stages, one chunk each, and an even number of micro-batches, at least two per stage.
    """
    depth, half = stages.depth, stages.micro_batches // 2
    if depth % 2 or stages.micro_batches % 2 or half < depth or stages.chunks != depth or stages.directions != 2:
        raise PlanError(
            f"{stages.micro_batches} micro-batches for {depth} stages: DualPipe needs an even number of both, and two "
            "micro-batches per stage"
        )
    return list(_Dual(stages, stage).slots(half))


class _Dual:
    """One stage's position in its own direction (0) and in the other one (1)."""

    def __init__(self, stages: Stages, stage: int) -> None:
        depth = stages.depth
        self.near = min(stage, depth - 1 - stage)
        self.far = depth // 2 - self.near - 1
        self._chunks = (self.near, depth - 1 - self.near)
        second_half = stage >= depth // 2
        self._parity = (int(second_half), int(not second_half))
        self._counts: dict[tuple[Part, int], Iterator[int]] = {}
        self._weights: list[Unit] = []

    def unit(self, part: Part, way: int) -> Unit:
        """The next forward or backward of a direction."""
        number = next(self._counts.setdefault(("f" if part == "f" else "b", way), count()))
        unit = Unit(self._chunks[way], part, (2 * number + self._parity[way],))
        if part == "i":
            self._weights.append(Unit(unit.chunk, "w", unit.micro_batches))
        return unit

    def slots(self, half: int) -> Iterator[Slot]:
        """All phases, for so many micro-batches per direction."""
        near, far, unit = self.near, self.far, self.unit
        yield from ((unit("f", 0),) for _ in range(2 * far))
        for _ in range(near + 1):
            yield from ((unit("f", 0),), (unit("f", 1),))
        for _ in range(far):
            yield from ((unit("i", 1),), (self._weights.pop(0),), (unit("f", 1),))
        for _ in range(half - 2 * (near + far + 1) + near + 1):
            yield from ((unit("f", 0), unit("b", 1)), (unit("f", 1), unit("b", 0)))
        for _ in range(far):
            yield from ((unit("b", 1),), (unit("f", 1), unit("b", 0)))
        yield from self._last(near + 1)
        for _ in range(far):
            yield from ((self._weights.pop(0),), (unit("i", 0),))
        yield from ((weight,) for weight in self._weights)

    def _last(self, pairs: int) -> Iterator[Slot]:
        """Backwards of both directions; weight gradients of the second half of them are put off."""
        for index in range(2 * pairs):
            yield (self.unit("b" if index < pairs else "i", 1 - index % 2),)
