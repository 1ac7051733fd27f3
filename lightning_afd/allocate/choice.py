"""A finished plan as a value that can be saved and reused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_afd.allocate.collocated import Prediction
from lightning_afd.allocate.division import Split
from lightning_afd.allocate.request import Candidate
from lightning_afd.allocate.verdict import Intensity, Verdict
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout

VERSION = 2
"""Of the file's format: it rises with every change of a field's name or meaning."""


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """What was chosen, why, and what else there was."""

    best: Candidate
    """What was chosen: layout, order, micro-batches, recomputation, predicted seconds."""
    attention_nics: float
    """NICs of each A rank."""
    ffn_nics: float
    """NICs of each F rank."""
    utilisation: float
    """Model FLOPs of a step over the peak of the used devices (0..1)."""
    division: Split | None
    """What the linear program says about one group of this layout's number of groups."""
    candidates: tuple[Candidate, ...]
    """Fastest first, and behind them those whose formula was too slow to simulate them."""
    verdict: Verdict
    """Whether it is worth it."""
    model: str = ""
    """What it is for: `ModelShape.describe`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """And with which: `Choices.options`; empty in files that were written before they were kept."""

    def others(self, options: Mapping[str, str]) -> dict[str, str]:
        """Its options that are not those of a job."""
        return {name: value for name, value in self.options.items() if options.get(name, value) != value}

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.dumps())

    def dumps(self) -> str:
        """The content of `save`'s file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> PlanChoice:
        """Read `save`'s file; raises PlanError if it is none, or of another version."""
        try:
            return cls.loads(Path(path).read_text(), str(path))
        except OSError as error:
            raise PlanError(f"plan={path} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"plan={path} is no plan: {error}") from error

    @classmethod
    def loads(cls, text: str, path: str) -> PlanChoice:
        """Read what `dumps` has made; raises the errors of `load`, which name `path`."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise PlanError(f"plan={path} is no plan: {error}") from error
        if not isinstance(content, dict) or "version" not in content:
            raise PlanError(f"plan={path} is no plan: it has no version")
        if content["version"] != VERSION:
            raise PlanError(
                f"plan={path} has version {content['version']}, but this package reads {VERSION}: make the plan again"
            )
        try:
            return _plan(content)
        except KeyError as error:
            raise PlanError(f"plan={path} is damaged: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise PlanError(f"plan={path} is damaged: {error}") from error


def _plan(content: Mapping[str, Any]) -> PlanChoice:
    content = {"options": {}, **content}
    values = {each.name: content[each.name] for each in fields(PlanChoice)}
    values["options"] = dict(values["options"])
    values["best"] = _candidate(values["best"])
    values["candidates"] = tuple(map(_candidate, values["candidates"]))
    values["division"] = None if values["division"] is None else Split(**values["division"])
    verdict = dict(values["verdict"])
    verdict["intensities"] = {role: Intensity(**found) for role, found in verdict["intensities"].items()}
    verdict["collocated"] = tuple(Prediction(**found) for found in verdict["collocated"])
    values["verdict"] = Verdict(**verdict)
    return PlanChoice(**values)


def _candidate(content: Mapping[str, Any]) -> Candidate:
    return Candidate(**{**content, "layout": Layout(**content["layout"])})
