"""What a run is asked to do: the values of conf/bench.yaml, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from lightning_afd.bench.conditions import parse_condition
from lightning_afd.bench.names import parse
from lightning_afd.errors import PlanError

SIZES = ("layers", "hidden", "heads", "experts", "top_k", "width", "vocabulary", "seq_len", "sequences")
"""Fields of `workload` that count something."""
SKEW = "skew"
"""The field of `workload` that may be no whole number, and 0."""
BALANCED = "balanced"
"""A width of experts that is found by measuring."""
RANKS = ("attention", "ffn", "micro_batches")
WORKLOAD = "workload."
PICTURES = ("map", "lines")

Cell = Mapping[str, Any]
"""Settings that differ from those of the run, such as {"workload.seq_len": 256}."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run."""

    attention: int
    ffn: int
    micro_batches: int
    contenders: list[str]
    rates: list[str]
    """Conditions of links, in network namespaces; none: the network as it is."""
    repetitions: int
    workload: dict[str, Any]
    """Fields of Workload; `width` may be "balanced"."""
    output_dir: str
    sweep: list[dict[str, list[Any]]] = field(default_factory=list)
    """Each entry's combinations of values are measured one after another, in place of the settings themselves."""
    probes: bool = False
    """Whether single links are measured, too."""
    command: str = "lightning-afd bench"
    chunk_bytes: int | None = 2**20
    device: str = "auto"
    """auto is cpu where there are `rates`; else see bench.job.device_of."""
    timeout: float = 300.0
    most_foreign_cpu: float | None = None
    picture: str = "map"
    """How many sections are shown: as a map of ratios, or as lines over what is swept."""
    docs: str | None = None
    """Markdown file that gets the tables."""
    docs_name: str = "standard"
    """Where in that file."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Settings:
        """Raises PlanError for what cannot be measured."""
        known = cls.__dataclass_fields__
        settings = cls(**{name: value for name, value in values.items() if name in known})
        for cell in settings.cells():
            settings.at(cell).check()
        limited = settings.rates and settings.device == "auto"  # GPUs of one machine don't use the limited links
        return replace(settings, device="cpu") if limited else settings

    @property
    def world(self) -> int:
        return self.attention + self.ffn

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    def cells(self) -> list[Cell]:
        """What is measured one after another; one empty cell without a sweep."""
        found: list[Cell] = [
            dict(zip(axes, values, strict=True))
            for axes in self.sweep
            for values in product(*map(_listed, axes.values()))
        ]
        return found or [{}]

    def at(self, cell: Cell) -> Settings:
        """The settings of one cell; raises PlanError for a name that cannot be swept."""
        sizes = {name.removeprefix(WORKLOAD): value for name, value in cell.items() if name.startswith(WORKLOAD)}
        ranks = {name: value for name, value in cell.items() if name in RANKS}
        swept = (*SIZES, SKEW)
        if unknown := [name for name in cell if name not in RANKS and name.removeprefix(WORKLOAD) not in swept]:
            names = ", ".join((*RANKS, *(WORKLOAD + size for size in swept)))
            raise PlanError(f"sweep: {unknown[0]} is not a choice; choices: {names}")
        return replace(self, sweep=[], workload={**self.workload, **sizes}, **ranks)

    def by_world(self) -> list[Settings]:
        """The same cells, divided into runs with one number of attention and expert ranks each."""
        runs: dict[tuple[int, int], list[Cell]] = {}
        for cell in self.cells():
            at = self.at(cell)
            runs.setdefault((at.attention, at.ffn), []).append(cell)
        return [
            replace(
                self, attention=attention, ffn=ffn, sweep=[{k: [v] for k, v in cell.items()} for cell in cells if cell]
            )
            for (attention, ffn), cells in runs.items()
        ]

    def check(self) -> None:
        """Raise PlanError for values that mean nothing."""
        for name in (*RANKS, "repetitions"):
            _whole(name, getattr(self, name))
        for name in SIZES:
            if (name, self.workload[name]) != ("width", BALANCED):
                _whole(f"{WORKLOAD}{name}", self.workload[name])
        skew = self.workload.get(SKEW, 0)
        if not isinstance(skew, int | float) or skew < 0:
            raise PlanError(f"{WORKLOAD}{SKEW}={skew} is not a number of at least 0")
        if self.picture not in PICTURES:
            raise PlanError(f"picture={self.picture} is not a choice; choices: {', '.join(PICTURES)}")
        if not self.contenders and not self.probes:
            raise PlanError("contenders=[]: name at least one, afd for example, or measure single links (probes=true)")
        for name in self.contenders:
            parse(name)
        self._check_rates()
        sequences = self.workload["sequences"]
        if sequences < self.world:
            raise PlanError(
                f"workload.sequences={sequences} for {self.world} ranks: each needs one of its own at least"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise PlanError(f"device={self.device} is not a choice; choices: auto, cpu, cuda")

    def _check_rates(self) -> None:
        for text in self.rates:
            condition = parse_condition(text)
            if condition.rank is not None and condition.rank >= self.world:
                raise PlanError(f"rate {text}: there are {self.world} ranks, from 0 to {self.world - 1}")
        if self.rates and self.device == "cuda":
            raise PlanError("rates are limits of network namespaces, which GPUs of one machine don't use: device=cpu")


def title_of(cell: Cell) -> str:
    """`seq_len 256, top_k 2`."""
    return ", ".join(f"{name.removeprefix(WORKLOAD)} {value}" for name, value in cell.items())


def _listed(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else [values]


def _whole(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise PlanError(f"{name}={value} is not a whole number of at least 1")
