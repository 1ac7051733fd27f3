"""The script for GPUs: in small on a CPU, and as it is where there is one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_afd.model.experts import ExpertShard


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", Path(__file__).with_name("check.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_it_runs_on_a_cpu(check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert check.main(["--device", "cpu", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["ok"] for row in rows} == {True, None}
    text = capsys.readouterr().out
    assert all(row["name"] in text for row in rows) and "WRONG" not in text


def test_it_says_what_is_wrong(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backward = ExpertShard.backward

    def broken(self: ExpertShard, *args: Any) -> Any:
        dx, dw, pending = backward(self, *args)
        return dx * (1 + 1e-1 * (dx.dtype != torch.float64)), dw, pending

    monkeypatch.setattr(ExpertShard, "backward", broken)
    monkeypatch.setattr(check, "CHECKS", (check.experts_equal_the_cpu,))
    assert check.main(["--device", "cpu", "--json", str(tmp_path / "rows.json")]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu(check: ModuleType, tmp_path: Path) -> None:
    assert check.main(["--json", str(tmp_path / "rows.json")]) == 0
