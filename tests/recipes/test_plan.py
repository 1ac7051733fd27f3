"""The command `plan`, end to end and in its own process: what it prints, writes and refuses, and what it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import golden_plans
import pytest
from hydra import compose, initialize_config_module

from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.allocate.choose import Effort, choose
from lightning_afd.allocate.request import Request
from lightning_afd.errors import PlanError
from lightning_afd.recipes.cli import TOOLS
from lightning_afd.recipes.plan import requested, shape_fields
from lightning_afd.recipes.plan_report import packed

SMALL = ("model=deepseek_v2_lite", "cluster.num_nodes=2", "data.global_batch=32", "groups=[1]", "candidates=2")


def plan(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder; it reports at the end which heavy libraries it has loaded."""
    program = (
        "import sys, lightning_afd.recipes.cli as cli; sys.argv.insert(1, 'plan'); cli.main();"
        "print('heavy:', *sorted({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, *settings, "hydra.run.dir=."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_plan_is_printed_saved_and_drawn(tmp_path: Path) -> None:
    done = plan(tmp_path, *SMALL, "data.documents=[300,2000,4096]")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "Candidates",
        "Choice: ",
        "Why: ",
        "Verdict: ",
        "experts inside a node",
        "top-12",
        "Packed documents: ",
    ):
        assert part in text
    assert text.endswith("heavy:")
    choice = PlanChoice.load(tmp_path / "plan.json")
    assert choice.best.layout.world <= 16
    assert choice.best.layout.describe() in text
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model=qwen9",), "model=qwen9 is not a choice; model can be deepseek_moe_16b, "),
        (("dedup=some",), "dedup=some is not a choice; dedup can be rank, node, none"),
        (("data.sequence=8",), "data.sequence is not a setting; data has "),
        (("model=pretrained", "model.pretrained=folder"), "folder/config.json can't be read: "),
        (("cluster.device.memory_gb=1",), "16 x H800-SXM-80GB fits into memory: the nearest one, "),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    done = plan(tmp_path, *SMALL, *settings)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("model", ["deepseek_moe_paper", "qwen3_235b_a22b"])
def test_plans_of_full_size_models_are_as_kept(model: str) -> None:
    """Two of them, as each takes seconds; `python tests/golden_plans.py` makes all again, and git shows the rest."""
    kept = (golden_plans.FOLDER / f"{model}.txt").read_text()
    assert golden_plans.printed(model) == kept, f"if this is wanted: python tests/golden_plans.py {model}"


def test_every_full_size_model_has_a_kept_plan_with_all_its_parts() -> None:
    assert {file.stem for file in golden_plans.FOLDER.glob("*.txt")} == set(golden_plans.MODELS)
    for file in golden_plans.FOLDER.glob("*.txt"):
        text = " ".join(file.read_text().split())
        for part in ("Candidates", "Choice: ", "Verdict: ", "effective ridge point", "best A/F ratio"):
            assert part in text, file
        for changed in ("sequences of 2048 tokens", "sequences of 8192 tokens", "routing", "FFN ranks", "busiest FFN"):
            assert changed in text, file


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_plan_for_this_machine(devices: int) -> None:
    """A small model on a few processes; one has no room for two roles."""
    settings = [f"cluster.devices_per_node={devices}", f"cluster.nics_per_node={devices}"]
    found = choose(small_request(*settings), Effort(layouts=3))
    assert found.best.layout.world <= devices
    assert found.verdict.collocated
    with pytest.raises(PlanError, match="need 2, but the cluster has 1"):
        small_request("cluster.devices_per_node=1")


def small_request(*settings: str) -> Request:
    chosen = ["model=qwen3_moe_tiny", "cluster=local", "data.seq_len=128", "data.global_batch=16", "output_dir=."]
    with initialize_config_module("lightning_afd.conf", version_base="1.3"):
        found: Request = requested(compose("plan", overrides=[*chosen, *settings]))
    return found


def test_help_lists_settings(tmp_path: Path) -> None:
    done = plan(tmp_path, "--help")
    assert "lightning-afd plan [model=choice]" in done.stdout
    assert "global_batch: 512" in done.stdout
    assert "plan" in TOOLS


def test_packed_rows_are_full() -> None:
    rows = packed([300, 2000], 4096, 10)
    assert [sum(row) for row in rows] == [4096] * 10
    assert all(length <= 2000 for row in rows for length in row)


def test_shape_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    fields = shape_fields({"pretrained": str(tmp_path), "config": {"num_experts": 4}})
    assert fields == {"model_type": "qwen3_moe", "num_experts": 4}
    with pytest.raises(PlanError, match="no shape in conf/model"):
        shape_fields({"config": {"use_cache": False}})
