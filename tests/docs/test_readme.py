"""README's commands are run: each is taken from the file, smaller where it is long, and its script as it stands.

What cannot be run inside a test (a whole benchmark, the suite itself) is looked through as far as possible without.
"""

from __future__ import annotations

import io
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from doc_pages import ROOT, blocks, commands, inline_commands
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from pool import RankPool
from tiny import tiny_hf
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_afd.recipes import cli, pretrain
from lightning_afd.recipes.launch import quoted
from lightning_afd.strategies.planning.options import Planning

README = ROOT / "README.md"
COMMANDS = list(dict.fromkeys([*commands(README), *inline_commands(README)]))
SMALL = (
    *("data.vocab_size=256", "data.seq_len=16", "data.batch_size=4", "sample.tokens=1"),
    *("model.config.num_hidden_layers=2", "model.config.hidden_size=16", "+trainer.limit_val_batches=1"),
    *("trainer.callbacks.progress=null", "+trainer.enable_progress_bar=false"),
)
"""Settings of the recipe with which a step takes no time."""


def run_python(*arguments: str, folder: Path) -> str:
    """Output of this Python in a folder; a failure fails the test."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def line_of(target: str) -> list[str]:
    """What `make` would run last, without the Python and the scripts of its environment."""
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    program, *words = shlex.split(done.stdout.splitlines()[-1])
    return [Path(program).name, *words]


def on_a_rank(settings: dict[str, Any], folder: str) -> str:
    """What a rank of the recipe does with its settings; returns what it writes."""
    os.chdir(folder)
    os.environ["LIGHTNING_AFD_CACHE"] = "cache"
    with redirect_stdout(io.StringIO()) as written:
        pretrain.run(OmegaConf.create(settings))
    return written.getvalue()


def composed(config_name: str, *overrides: str) -> DictConfig:
    """What Hydra makes of settings."""
    with initialize_config_module(version_base="1.3", config_module="lightning_afd.conf"):
        return compose(config_name, list(overrides))


def train(pool: RankPool, folder: Path) -> None:
    """The default recipe on its four ranks, then from its checkpoint on two, in another order."""
    (folder / "text.txt").write_text(" ".join(map(str, range(4000))), encoding="utf-8")
    program, name, *own = line_of("train")
    assert (program, name) == ("lightning-afd", "pretrain")

    def run(ranks: int, *settings: str) -> list[str]:
        config = composed("config", *own, *SMALL, f"data.files=[{folder / 'text.txt'}]", *settings)
        pretrain.check(config)
        assert config.devices == ranks
        return pool.run(on_a_rank, ranks, OmegaConf.to_container(config, resolve=True), str(folder))

    said = run(4, "trainer.max_steps=2", "output_dir=first")
    assert "val_loss" in said[0] and said[0].count("\n") == 5 and not any(said[1:])
    left = {path.name for path in (folder / "first").iterdir()}
    assert left == {"checkpoints", "logs", "report.html", "timeline.png", "trace"}
    (checkpoint,) = (folder / "first" / "checkpoints").iterdir()
    resumed = quoted(f"ckpt_path={checkpoint}", pretrain.PATHS)
    run(
        2,
        resumed,
        "strategy.attention=1",
        "strategy.ffn=1",
        "strategy.order=layer-major",
        "trainer.max_steps=3",
        "output_dir=second",
    )
    assert [path.name[:7] for path in (folder / "second" / "checkpoints").iterdir()] == ["step=3-"]


def collect(_: RankPool, folder: Path) -> None:
    """The suite itself, up to where it would run a part of it."""
    program, *words = line_of("test")
    collected = run_python(*words, "-n", "0", "--collect-only", "-q", "tests/test_layers.py", folder=ROOT)
    assert program == "python" and "tests/test_layers.py" in collected


def plan(command: str, folder: Path) -> None:
    """The plan that README speaks of, for one number of groups, one layout and a smaller batch."""
    words = shlex.split(command)[1:]
    said = run_python(
        "-m",
        "lightning_afd.recipes.cli",
        *words,
        "groups=[8]",
        "candidates=1",
        "data.global_batch=64",
        "hydra.run.dir=.",
        folder=folder,
    )
    assert "Verdict: Do not disaggregate" in " ".join(said.split())
    assert {"plan.json", "plan.png"} <= {path.name for path in folder.iterdir()}


def bench(command: str) -> None:
    """Network namespaces need root, and the measurement minutes: its settings are put together."""
    assert "500mbit" in composed("bench", *shlex.split(command)[2:], "output_dir=.").rates


def help_of(run: Callable[[], object], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a program says about its arguments."""
    monkeypatch.setattr(sys, "argv", [*arguments, "--help"])
    with redirect_stdout(io.StringIO()) as written, pytest.raises(SystemExit) as ended:
        run()
    assert not ended.value.code
    return written.getvalue()


def soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty jobs: minutes, so that only its arguments are looked at."""
    _, script, *_rest = line_of("soak")
    assert "--rounds" in help_of(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), [script], monkeypatch)


def survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """All architectures take minutes; a few of them are a test of their own."""
    assert "--short" in help_of(cli.main, ["lightning-afd", "survey"], monkeypatch)


def overhead(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement: its arguments are those that it knows."""
    _, script, *options = shlex.split(command)
    said = help_of(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), [script], monkeypatch)
    assert all(option in said for option in ("--attention", "--ffn", "--tokens", *options[::2]))


RUN: Mapping[str, Callable[[RankPool, Path], None]] = {"make train": train, "make test": collect}


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command in RUN:
        RUN[command](pool, tmp_path)
    elif command.startswith("lightning-afd plan"):
        plan(command, tmp_path)
    elif command.startswith("lightning-afd bench"):
        bench(command)
    elif command in ("lightning-afd survey", "make soak"):
        (soak if command == "make soak" else survey)(monkeypatch)
    elif command.startswith("python benchmarks/engine_overhead.py"):
        overhead(command, monkeypatch)
    else:
        pytest.fail(f"{command}: no test knows how to run this command of the README")


class MyLightningModule(L.LightningModule):
    """The user's own module, which knows of no strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_hf("qwen3_moe")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def six_lines(code: str, folder: str) -> tuple[str, int]:
    """The script of a user; its Trainer makes two steps, as its environment says."""
    os.chdir(folder)
    os.environ |= {"PL_TRAINER_MAX_STEPS": "2", "PL_TRAINER_ENABLE_PROGRESS_BAR": "False", "PL_TRAINER_LOGGER": "False"}
    rows = [dict.fromkeys(("input_ids", "labels"), torch.arange(6) + row) for row in range(16)]
    names = {"MyLightningModule": MyLightningModule, "my_datamodule": DataLoader(rows, batch_size=4)}
    quick = {"budget_seconds": 2.0, "trials": 1}  # instead of a minute
    with patch.dict(Planning.__init__.__kwdefaults__, quick):
        exec(code, names)
    trainer = names["trainer"]
    return trainer.strategy.layout.describe(), trainer.global_step  # type: ignore[attr-defined]


def test_six_lines(pool: RankPool, tmp_path: Path) -> None:
    (block,) = blocks(README, "python")
    assert len([line for line in block.text.splitlines() if line]) == 4
    done = pool.run(six_lines, 4, block.text, str(tmp_path))
    assert done == [done[0]] * 4 and done[0][1] == 2
