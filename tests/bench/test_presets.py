"""What the choices of `bench=` compare."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_afd.bench.names import Spec, parse
from lightning_afd.bench.settings import Settings

FAIR = {
    "standard": {"flowmoe:2", "experts-only:2"},
    "local_net": {"flowmoe:2", "experts-only:2"},
    "peers": {"flowmoe:2"},
    "vocabulary": {"flowmoe:2"},
}
"""Collocated contenders that have the rows per micro-batch of `afd`."""


def preset(name: str) -> Settings:
    with initialize_config_module(version_base="1.3", config_module="lightning_afd.conf"):
        config = compose("bench", [f"bench={name}", "output_dir=."])
    values: Any = OmegaConf.to_container(config)
    return Settings.read(values)


def rows(settings: Settings, spec: Spec) -> Fraction:
    """Per micro-batch."""
    counted, layout = spec.counted(settings.micro_batches), spec.layout(settings.attention, settings.ffn)
    assert counted.micro_batches is not None
    return Fraction(settings.workload["sequences"], layout.attention * counted.micro_batches)


@pytest.mark.parametrize("name", ["standard", "local_net", "peers", "vocabulary", "short", "grid", "faults"])
def test_collocated_contenders_with_the_rows_of_afd(name: str) -> None:
    settings = preset(name)
    own = [spec for spec in map(parse, settings.contenders) if spec is not None]
    by_name = {str(spec): rows(settings, spec) for spec in own}
    assert set(by_name) <= set(settings.contenders) and by_name["afd"] == 2 and by_name["flowmoe"] == 1
    overlapping = {str(spec) for spec in own if not spec.apart and spec.strategy != "ep" and spec.dedup}
    assert {contender for contender in overlapping if by_name[contender] == by_name["afd"]} == FAIR.get(name, set())
