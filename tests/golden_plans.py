"""What `lightning-afd plan` prints for the full-size models, kept in tests/golden/plan; made again by

python tests/golden_plans.py            (all; give names for some of them; about 5 s of CPU each)
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from hydra import compose, initialize_config_module
from rich.console import Console

from lightning_afd.allocate.choose import Effort, choose
from lightning_afd.recipes.plan import requested
from lightning_afd.recipes.plan_report import tables

FOLDER = Path(__file__).resolve().parent / "golden" / "plan"
SMALLER = {"deepseek_v3": ("precision=bf16-true",)}
"""Where 16 nodes of 8 H800 don't hold a model with float32 weights: what they hold."""
MODELS = (
    *("deepseek_moe_16b", "deepseek_moe_paper", "deepseek_v2_lite", "deepseek_v3", "gpt_oss_20b", "gpt_oss_120b"),
    *("gpt_oss_paper", "qwen3_30b_a3b", "qwen3_235b_a22b", "qwen3_paper"),
)


def printed(model: str) -> str:
    """All tables and texts, for sequences of 4096 tokens."""
    with initialize_config_module("lightning_afd.conf", version_base="1.3"):
        settings = [f"model={model}", "cluster=h800_16x8", "output_dir=.", *SMALLER.get(model, ())]
        request = requested(compose("plan", overrides=settings))
    console = Console(file=io.StringIO(), width=120, highlight=False, color_system=None)
    for part in tables(request, choose(request, Effort(solver="cbc"))):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def main(names: list[str]) -> None:
    """Write the files of these models."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        (FOLDER / f"{name}.txt").write_text(printed(name))


if __name__ == "__main__":
    main(sys.argv[1:])
