"""What the folder of a run holds: recorded steps, the logger's metrics, the recipe's settings."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lightning_afd.errors import RecordingError, ScheduleError
from lightning_afd.recording import Recording, load, recordings_in
from lightning_afd.recording.saved import FOLDER as TRACE
from lightning_afd.waits import Usage, Wait, usage_of, waits_of

MOST = 100
"""So many recordings are read at most, spread over the run: more would take long and show no more."""
POOLED = 5
"""Steps whose receives are put together at most; fewer where they have more than POOLED_ACTIONS in all."""
POOLED_ACTIONS = 500_000
METRICS, SETTINGS = "metrics.csv", "config.yaml"
Points = tuple[tuple[float, float], ...]
"""(optimizer step, value)."""
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with at least one recorded step."""

    name: str
    recordings: tuple[Recording, ...]
    """By step; at most MOST of them."""
    recorded: int
    """How many steps have been recorded."""
    chosen: Recording
    """The one that is shown in detail."""
    metrics: Mapping[str, Points]
    """Of the CSVLogger, by column; empty where there is none."""
    model: str
    """Type of the transformers model, as the recipe's settings have it; empty where they aren't there."""

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Every receive of the chosen step."""
        return _waits(self.chosen)

    @cached_property
    def usage(self) -> dict[int, Usage]:
        """How each rank spends the chosen step."""
        return usage_of(self.chosen.timeline, self.waits)

    @cached_property
    def pooled(self) -> tuple[Recording, ...]:
        """Recordings of the chosen one's layout and shape, POOLED at most; others tell nothing of its stages."""
        chosen = self.chosen
        same = [o for o in self.recordings if (o.timeline.layout, o.shape) == (chosen.timeline.layout, chosen.shape)]
        most = min(POOLED, POOLED_ACTIONS // max(1, len(chosen.timeline.spans)))
        return tuple(_spread(same, most)) if most > 1 else (chosen,)

    @cached_property
    def all_waits(self) -> tuple[Wait, ...]:
        """Every receive of the pooled steps."""
        return tuple(wait for one in self.pooled for wait in (self.waits if one is self.chosen else _waits(one)))


def read_run(folder: str | Path, step: int | None = None) -> Run:
    """Read a run, to show its recorded step `step` in detail, by default the one of median length.

    Raises RecordingError for a folder without recorded steps, for a step that is not recorded, and for files that are
    not what their names say.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordingError(f"run={folder} is no folder: give the output folder of a run, which holds trace/")
    paths = recordings_of(folder)
    if not paths:
        raise RecordingError(
            f"{folder} has no recorded steps (trace/step-*.json): train with AFDStrategy(trace=50), or "
            "strategy.trace=50 in the recipe, to record every 50th"
        )
    recordings = tuple(_loaded(path) for path in _spread(paths, MOST))
    return Run(
        name=folder.resolve().name,
        recordings=recordings,
        recorded=len(paths),
        chosen=_median(recordings) if step is None else _of_step(recordings, step),
        metrics=read_metrics(metrics) if (metrics := _newest(folder, METRICS)).is_file() else {},
        model=_model(folder / SETTINGS),
    )


def _loaded(path: Path) -> Recording:
    recording = load(path)
    if recording.seconds <= 0 or not recording.timeline.spans:
        raise RecordingError(f"{path} is a damaged recording: nothing happened in {recording.seconds:g} seconds")
    return recording


def _waits(recording: Recording) -> tuple[Wait, ...]:
    try:
        return waits_of(recording.timeline, recording.shape)
    except ScheduleError as error:
        raise RecordingError(f"the recording of step {recording.global_step} is damaged: {error}") from error


def tokens_per_second(recording: Recording) -> float:
    """Tokens of all A ranks over the time of the slowest rank."""
    return recording.tokens / recording.seconds


def recordings_of(folder: Path) -> list[Path]:
    """The files of all recorded steps of a run."""
    return recordings_in(_newest(folder, TRACE).parent)


def _spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of them, the first and the last one included."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _median(recordings: tuple[Recording, ...]) -> Recording:
    return sorted(recordings, key=lambda one: (one.seconds, one.global_step))[(len(recordings) - 1) // 2]


def _of_step(recordings: tuple[Recording, ...], step: int) -> Recording:
    for one in recordings:
        if one.global_step == step:
            return one
    raise RecordingError(f"step={step} is not recorded; there are {', '.join(str(o.global_step) for o in recordings)}")


def _newest(folder: Path, name: str) -> Path:
    """The newest one of this name in a run's folder, or in one at most two levels below it, as loggers make them."""
    found = [path for depth in ("", "*/", "*/*/") for path in folder.glob(depth + name)]
    return max(found, key=lambda path: (path.stat().st_mtime, str(path)), default=folder / name)


def read_metrics(path: Path) -> dict[str, Points]:
    """Every column of a file of Lightning's CSVLogger by its steps, empty and non-finite cells left out."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return _columns(csv.DictReader(file), path)
    except csv.Error as error:
        raise RecordingError(f"{path} is no file of Lightning's CSVLogger: {error}") from error


def _columns(rows: csv.DictReader[str], path: Path) -> dict[str, Points]:
    if "step" not in (rows.fieldnames or ()):
        raise RecordingError(f"{path} is no file of Lightning's CSVLogger: its first line has no column 'step'")
    columns: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        step = _number(row.pop("step"), path, rows.line_num)
        for name in row.keys() - {"epoch", None}:
            if row[name]:
                columns.setdefault(name, []).append((step, _number(row[name], path, rows.line_num)))
    names = (name for name in rows.fieldnames or () if name in columns)
    return {name: finite for name in names if (finite := _finite(columns[name]))}


def _number(text: str | None, path: Path, line: int) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise RecordingError(
            f"{path} is no file of Lightning's CSVLogger: line {line} has {text!r} for a number"
        ) from None


def _finite(points: list[tuple[float, float]]) -> Points:
    return tuple(point for point in points if all(map(math.isfinite, point)))


def _model(path: Path) -> str:
    """Type of the model in the settings of a recipe's run."""
    from omegaconf import OmegaConf

    if not path.is_file():
        return ""
    try:
        settings: Any = OmegaConf.load(path)
        return str(OmegaConf.select(settings, "model.config.model_type") or "")
    except Exception as error:  # YAML's own errors and OmegaConf's have no common base
        raise RecordingError(f"{path} cannot be read as settings: {' '.join(str(error).split())}") from error
