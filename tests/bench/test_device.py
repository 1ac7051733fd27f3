"""Where ranks of the benchmark compute: on GPUs only if each has its own, and not where links are limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_afd.bench.job import device_of
from lightning_afd.bench.settings import Settings
from lightning_afd.bench.start import _own
from lightning_afd.errors import PlanError

CONF = Path(__file__).resolve().parents[2] / "conf" / "bench.yaml"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def variables(ranks: int, rank: int = 0) -> dict[str, str]:
    """Of torchrun on one of two nodes."""
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(2 * ranks)}


@pytest.mark.usefixtures("two_gpus")
def test_auto_is_a_gpu_for_each_rank_of_the_node_or_for_none() -> None:
    assert [device_of("auto", variables(2, rank)) for rank in (0, 1)] == [torch.device("cuda", n) for n in (0, 1)]
    assert {device_of("auto", variables(3, rank)) for rank in (0, 1, 2)} == {torch.device("cpu")}
    assert device_of("cpu", variables(2)) == torch.device("cpu")
    assert device_of("cuda", variables(2, 1)) == torch.device("cuda", 1)
    for rank in range(3):
        with pytest.raises(PlanError, match="device=cuda: 2 GPUs for the 3 ranks of this node"):
            device_of("cuda", variables(3, rank))


@pytest.mark.usefixtures("two_gpus")
def test_ranks_that_the_command_starts_are_all_on_this_node() -> None:
    assert [device_of("auto", _own(rank, 2)).type for rank in range(2)] == ["cuda", "cuda"]
    assert {device_of("auto", _own(rank, 3)).type for rank in range(3)} == {"cpu"}


def test_auto_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto", variables(1)) == torch.device("cpu")


@pytest.mark.parametrize(("rates", "device"), [([], "auto"), (["500mbit"], "cpu"), (["unshaped"], "cpu")])
def test_auto_is_the_cpu_where_links_are_limited(rates: list[str], device: str) -> None:
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF))
    settings = Settings.read({**values, "output_dir": ".", "rates": rates})
    assert settings.device == device
    assert Settings.read(settings.as_dict()) == settings
    if rates:
        with pytest.raises(PlanError, match="GPUs of one machine don't use"):
            Settings.read({**values, "output_dir": ".", "rates": rates, "device": "cuda"})
