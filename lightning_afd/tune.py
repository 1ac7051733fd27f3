"""Find S_p, the bytes of one chunk of the dense gradients' all-reduce, from a few noisy samples of the step time.

FlowMoE's search, with what its public scripts leave open decided: a Gaussian process (optuna's GPSampler) on log2 S_p;
"no chunks" is one of the arms and is measured first and last, the best chunk size twice, so that the noise between
samples is known; the best measured value is adopted, and "no chunks" unless chunks are faster by more than that noise.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

from lightning_afd.errors import PlanError

if TYPE_CHECKING:
    import optuna

KIB, MIB = 2**10, 2**20
_FIRST = (0.2, 0.5, 0.8)
"""Where between the smallest and the largest log2 S_p the search begins."""
_FEWEST = 5


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How S_p is searched."""

    samples: int = 8
    """Chunk sizes that are measured, "no chunks" and repetitions included."""
    steps: int = 10
    """Steps of each sample that count; one more goes before them."""
    least: int = 128 * KIB
    """The smallest S_p that is tried: smaller messages cost more than they carry."""
    most: int = 64 * MIB
    """The largest one."""
    seed: int = 0
    """Of the search."""

    def __post_init__(self) -> None:
        if self.samples < _FEWEST or self.steps < 2 or not 1 <= self.least <= self.most:
            raise PlanError(
                f"samples={self.samples}, steps={self.steps}, least={self.least}, most={self.most}: tuning S_p needs "
                f"{_FEWEST} samples, 2 steps and 1 <= least <= most at least"
            )


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What the search has found."""

    chunk_bytes: int | None
    """S_p; None: no chunks, the gradients are summed at the end of the step."""
    fastest: int
    """The fastest S_p, adopted or not."""
    seconds: float
    """Step time with `fastest`."""
    without: float
    """Step time without chunks."""
    noise: float
    """Standard error of the difference between the two."""

    def __str__(self) -> str:
        if self.chunk_bytes is None:
            times = f"{self.without:.4g} s, with the best S_p ({in_bytes(self.fastest)}) {self.seconds:.4g} s"
            return f"no chunks: step {times} +- {self.noise:.2g} s"
        times = f"step {self.seconds:.4g} s, without chunks {self.without:.4g} s +- {self.noise:.2g} s"
        return f"S_p = {in_bytes(self.fastest)}: {times}"


class Tuner:
    """A search that is asked for the next chunk size and told how long steps took, until `tuned` is there.

    It is deterministic: the same seed and the same times give the same questions.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._seconds: defaultdict[int | None, list[Sequence[float]]] = defaultdict(list)
        self._study = _study(tuning.seed)
        self._trial: optuna.Trial | None = None
        self._asked: int | None = None
        self._told = 0
        low, high = self._range
        for part in _FIRST:
            self._study.enqueue_trial({"log2": low + part * (high - low)})

    @property
    def tuned(self) -> Tuned | None:
        """The decision, when all samples are there."""
        return self._decide() if self._told == self._tuning.samples else None

    def ask(self) -> int | None:
        """The chunk size (None: no chunks) of the next sample."""
        self._trial = None
        if self._told in (0, self._tuning.samples - 1):
            self._asked = None
        elif self._told == self._tuning.samples - 2:
            self._asked = self._fastest()
        else:
            self._asked = self._propose()
        return self._asked

    def tell(self, seconds: Sequence[float]) -> None:
        """How long the steps of the sample took that was asked for."""
        self._seconds[self._asked].append(seconds)
        self._told += 1
        if self._trial is not None:
            self._study.tell(self._trial, median(seconds))

    @property
    def _range(self) -> tuple[float, float]:
        return math.log2(self._tuning.least), math.log2(self._tuning.most)

    def _propose(self) -> int:
        from optuna.distributions import FloatDistribution

        with _quiet():
            self._trial = self._study.ask({"log2": FloatDistribution(*self._range)})
        return round(2 ** float(self._trial.params["log2"]))

    def _fastest(self) -> int:
        sizes = [size for size in self._seconds if size is not None]
        return min(sizes, key=self._time)

    def _time(self, size: int | None) -> float:
        """Mean over the samples of a size of the median of their steps, of which some may be disturbed."""
        return fmean(median(sample) for sample in self._seconds[size])

    def _decide(self) -> Tuned:
        fastest = self._fastest()
        seconds, without, noise = self._time(fastest), self._time(None), self._noise(fastest)
        return Tuned(
            chunk_bytes=fastest if seconds + noise < without else None,
            fastest=fastest,
            seconds=seconds,
            without=without,
            noise=noise,
        )

    def _noise(self, size: int) -> float:
        """Standard error of the difference of two times: between repeated samples, or within them if that is more."""
        repeated = [[median(sample) for sample in found] for found in self._seconds.values() if len(found) > 1]
        between = fmean(stdev(times) ** 2 / len(times) for times in repeated)
        within = fmean(
            stdev(sample) ** 2 / len(sample) / len(self._seconds[arm])
            for arm in (size, None)
            for sample in self._seconds[arm]
        )
        return math.sqrt(2 * max(between, within))


def _study(seed: int) -> optuna.Study:
    """Optuna and what it needs are imported here: nobody else pays for it."""
    import optuna
    from optuna.samplers import GPSampler, RandomSampler

    with _quiet():
        sampler = GPSampler(
            seed=seed,
            n_startup_trials=len(_FIRST),
            independent_sampler=RandomSampler(seed=seed),
            deterministic_objective=False,
        )
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=sampler)
        optuna.logging.set_verbosity(verbosity)
    return study


def _quiet() -> warnings.catch_warnings[None]:
    """Optuna calls the sampler experimental at each turn."""
    return warnings.catch_warnings(action="ignore")


def in_bytes(size: int) -> str:
    """`1.5 MiB`, `512 KiB`, `7 B`."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"
