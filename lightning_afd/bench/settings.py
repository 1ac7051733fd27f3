"""What a run is asked to do: the values of conf/bench.yaml, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_afd.bench.names import parse
from lightning_afd.bench.rates import bits_of
from lightning_afd.errors import PlanError

SIZES = ("layers", "hidden", "heads", "experts", "top_k", "width", "vocabulary", "seq_len", "sequences")
"""Fields of `workload` that count something."""
BALANCED = "balanced"
"""A width of experts that is found by measuring."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run."""

    attention: int
    ffn: int
    micro_batches: int
    contenders: list[str]
    rates: list[str]
    """Link rates, in network namespaces; none: the network as it is."""
    repetitions: int
    workload: dict[str, Any]
    """Fields of Workload; `width` may be "balanced"."""
    output_dir: str
    command: str = "lightning-afd bench"
    chunk_bytes: int | None = 2**20
    device: str = "auto"
    timeout: float = 300.0
    most_foreign_cpu: float | None = None
    docs: str | None = None
    """Markdown file that gets the tables."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Settings:
        """Raises PlanError for what cannot be measured."""
        known = cls.__dataclass_fields__
        settings = cls(**{name: value for name, value in values.items() if name in known})
        settings._check()
        return settings

    @property
    def world(self) -> int:
        return self.attention + self.ffn

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    def _check(self) -> None:
        for name in ("attention", "ffn", "micro_batches", "repetitions"):
            _whole(name, getattr(self, name))
        for name in SIZES:
            if (name, self.workload[name]) != ("width", BALANCED):
                _whole(f"workload.{name}", self.workload[name])
        if not self.contenders:
            raise PlanError("contenders=[]: name at least one, afd for example")
        for name in self.contenders:
            parse(name)
        for rate in self.rates:
            bits_of(rate)
        sequences, world = self.workload["sequences"], self.world
        if sequences < world:
            raise PlanError(f"workload.sequences={sequences} for {world} ranks: each needs one of its own at least")
        if self.device not in ("auto", "cpu", "cuda"):
            raise PlanError(f"device={self.device} is not a choice; choices: auto, cpu, cuda")
        if self.rates and self.device == "cuda":
            raise PlanError("rates are limits of network namespaces, which GPUs of one machine don't use: device=cpu")


def _whole(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise PlanError(f"{name}={value} is not a whole number of at least 1")
