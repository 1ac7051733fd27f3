"""What `lightning-afd pretrain` makes of its command line, before and around the training itself."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_afd.corpus import train_tokenizer
from lightning_afd.errors import PlanError
from lightning_afd.recipes import launch
from lightning_afd.recipes.launch import quoted
from lightning_afd.recipes.pretrain import check, trainer_settings, verdict
from lightning_afd.recipes.ranks import check_ranks

ROOT = Path(__file__).parents[2]
MODELS = ", ".join(sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")))
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(
    folder: Path, *arguments: str, first_on_path: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `lightning-afd` in `folder`, as if no launcher had started this test."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (first_on_path, str(ROOT))))
    environment["LIGHTNING_AFD_CACHE"] = str(folder / "cache")
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "lightning_afd.recipes.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module(version_base="1.3", config_module="lightning_afd.conf"):
        config = compose("config", [*overrides, "output_dir=here"])
    return config


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    """A folder in which torch and lightning exist, but end whoever imports them."""
    folder = tmp_path / "poison"
    folder.mkdir()
    for name in ("torch", "lightning", "transformers"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n", encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["strategy.micro_batchez=4"],
            "strategy.micro_batchez is not a setting; strategy has attention, capacity, dedup, expert_bias_rate, ffn, ",
        ),
        (["model=nosuch"], f"model=nosuch is not a choice; model can be {MODELS}"),
        (["-m", "seed=1,2", "model=nosuch"], f"model=nosuch is not a choice; model can be {MODELS}"),
        (["strategy=auto", "strategy.ffn=1"], "strategy.ffn is not a setting; strategy has no settings"),
        (
            ["sead=1"],
            "sead is not a setting; the config has ckpt_path, cluster, data, devices, model, output_dir, sample, seed,",
        ),
        (["strategy.order=fast"], "strategy.order=fast is not a choice; choices: af-pipe, layer-major, sequential"),
        (["devices=2"], "devices=2 on cluster.num_nodes=1 are 2 ranks, but strategy.groups=1 x (strategy.attention=2"),
        (["ckpt_path=nowhere=1.ckpt"], "ckpt_path=nowhere=1.ckpt does not exist: give a checkpoint of a run"),
        (["model=pretrained"], "model.pretrained must be given: model.pretrained=..."),
        (["data.files=[nowhere.txt]"], "data.files: nowhere.txt is not a file"),
        (["seed"], "'seed' is not of the form key=value"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, no_torch: str, arguments: list[str], message: str) -> None:
    done = run(tmp_path, "pretrain", *arguments, first_on_path=no_torch)
    assert done.returncode == 1
    assert done.stderr.startswith(f"lightning-afd: {message}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not list(tmp_path.rglob("config.yaml"))
    assert not (tmp_path / "outputs").exists()


def test_right_settings_do_reach_torch(tmp_path: Path, no_torch: str) -> None:
    done = run(tmp_path, "pretrain", first_on_path=no_torch)
    assert done.returncode == 1
    assert "was imported" in done.stderr
    assert len(list(tmp_path.rglob("config.yaml"))) == 1


def test_unknown_recipe_and_help(tmp_path: Path, no_torch: str) -> None:
    unknown = run(tmp_path, "pretrian", first_on_path=no_torch)
    assert (unknown.returncode, unknown.stderr) == (
        1,
        "lightning-afd: pretrian is not a recipe; choices: bench, export, plan, pretrain, report, survey\n",
    )
    general, special = run(tmp_path, "--help"), run(tmp_path, "pretrain", "--help", first_on_path=no_torch)
    assert (general.returncode, special.returncode) == (0, 0)
    assert "recipes: bench, export, plan, pretrain, report" in general.stdout
    assert special.stdout.startswith("lightning-afd pretrain [group=choice]")
    assert f"model: {MODELS}" in special.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out=there"], "ckpt must be given: ckpt=..."),
        (["cpkt=here"], "cpkt is not a setting; the config has ckpt, config, max_shard_size, model, out"),
    ],
)
def test_a_wrong_setting_of_export_is_one_sentence(
    tmp_path: Path, no_torch: str, arguments: list[str], message: str
) -> None:
    done = run(tmp_path, "export", *arguments, first_on_path=no_torch)
    assert (done.returncode, done.stderr, done.stdout) == (1, f"lightning-afd: {message}\n", "")


def test_help_of_export(tmp_path: Path, no_torch: str) -> None:
    done = run(tmp_path, "export", "--help", first_on_path=no_torch)
    assert done.returncode == 0 and done.stdout.startswith("lightning-afd export ckpt=<checkpoint> out=<folder>")
    assert "max_shard_size: 5GB" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["poison"]


def test_a_failed_job_of_a_sweep_is_reported_once(tmp_path: Path, no_torch: str) -> None:
    done = run(tmp_path, "pretrain", "-m", "seed=1,2", first_on_path=no_torch)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lightning-afd: the job in ")
    assert last.count("ended with exit code 1") == 2


def test_a_sweep_leaves_one_tree(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(4000))), encoding="utf-8")
    tiny = ["data.vocab_size=256", "data.seq_len=16", "data.batch_size=1", "data.files=[text.txt]"]
    tiny += ["model.config.num_hidden_layers=1", "model.config.hidden_size=16", "sample.tokens=1"]
    tiny += ["trainer.max_steps=1", "+trainer.limit_val_batches=1", "trainer.callbacks.progress=null"]
    done = run(tmp_path, "pretrain", "-m", "devices=2,1", "strategy=auto", *tiny, timeout=240)
    assert done.returncode == 0, done.stderr
    (tree,) = tmp_path.glob("multirun/*/*")
    assert not (tmp_path / "outputs").exists()
    assert sorted(path.name for path in tree.iterdir()) == ["0", "1", "multirun.yaml"]
    for job, devices in (("0", 2), ("1", 1)):
        (config,) = (tree / job).rglob("config.yaml")
        (_,) = (tree / job / "checkpoints").iterdir()
        assert OmegaConf.load(config).devices == devices
        assert done.stdout.count(f"outputs  {tree / job}\n") == 1
    assert done.stdout.count("val_loss ") == 2


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([], 4),
        (["strategy.attention=1", "strategy.ffn=3"], 4),
        (["strategy.groups=2", "strategy.ffn=1"], 6),
        (["strategy.groups=2", "cluster.num_nodes=4"], 2),
        (["strategy.groups=[2,1]", "strategy.attention=1"], 4),
        (["strategy.groups='1,3'", "strategy.ffn=1"], 5),
        (["strategy=auto"], 1),
        (["strategy=auto", "devices=3"], 3),
        (["strategy=ep"], 2),
        (["strategy=flowmoe", "devices=4"], 4),
        (["strategy=planned", "devices=3"], 3),
        (["strategy=planned", "strategy.attention=1", "strategy.order=zero-bubble"], 4),
    ],
)
def test_devices_follow_the_strategy(overrides: list[str], devices: int) -> None:
    config = composed(*overrides)
    check(config)
    assert config.trainer.devices == devices


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["devices=3"], "are 3 ranks"),
        (["cluster.num_nodes=3"], "are 6 ranks"),
        (["devices=two"], "devices=two is not a whole number"),
        (["strategy=flowmoe", "strategy.order=af-pipe"], "choices: experts-only, flowmoe, sequential"),
        (["strategy=ep", "strategy.micro_batches=0"], r"strategy\.micro_batches=0 is not a whole number of at least 1"),
        (["strategy=planned", "strategy.ffn=many"], r"strategy\.ffn=many is not a whole number of at least 1"),
        (["strategy=planned", "strategy.order=best"], r"choices: af-pipe, layer-major, sequential, zero-bubble, auto"),
        (["strategy.attention=0"], r"strategy\.attention=0 is not a whole number of at least 1"),
        (["devices=3", "strategy.groups=[2,1]"], r"but 2 x strategy\.attention=2 \+ 1 x strategy\.ffn=2 are 6: change"),
        (["strategy.groups=[2,0]"], r"strategy\.groups=\[2, 0\]: at least 1 is needed"),
        (["strategy.groups=[1,2,3]"], r"strategy\.groups=\[1, 2, 3\]: give one number for both roles, or a pair"),
        (["strategy.micro_batches=1.5"], r"strategy\.micro_batches=1\.5 is not a whole number"),
    ],
)
def test_ranks_that_do_not_fit(overrides: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_ranks(composed(*overrides))


def test_a_short_run_validates_at_its_end() -> None:
    assert composed("trainer.max_steps=7").trainer.val_check_interval == 7
    assert composed("trainer.max_steps=-1").trainer.val_check_interval == 100


def test_callbacks_are_a_list_and_null_removes_one() -> None:
    targets = [callback["_target_"] for callback in trainer_settings(composed())["callbacks"]]
    assert "lightning.pytorch.callbacks.ModelCheckpoint" in targets
    fewer = trainer_settings(composed("trainer.callbacks.progress=null"))["callbacks"]
    assert len(fewer) == len(targets) - 1


def test_verdict_says_which_is_smaller() -> None:
    assert "below the 2.000" in verdict(1.5, 2.0)
    assert "NOT below the 2.000" in verdict(2.5, 2.0)
    assert "NOT below" in verdict(math.nan, 2.0)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, None),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 5),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, 3),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "bash"}, None),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"LOCAL_RANK": "0"}, 0),
    ],
)
def test_rank_of_an_external_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int | None
) -> None:
    for name in [*LAUNCHER_VARIABLES, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.external_rank() == rank


def test_paths_with_an_equals_sign_are_quoted_for_hydra() -> None:
    paths = ("ckpt", "out")
    assert quoted("ckpt=a/step=3-val_loss=2.1.ckpt", paths) == "ckpt='a/step=3-val_loss=2.1.ckpt'"
    assert quoted("out=it's", paths) == r"out='it\'s'"
    assert [quoted(text, paths) for text in ("max_shard_size=1MB", "ckpt='a'", "--help", "out=")] == [
        *("max_shard_size=1MB", "ckpt='a'", "--help", "out=")
    ]


def test_each_recipe_has_its_two_functions() -> None:
    assert "pretrain" in launch.RECIPES
    for module in map(importlib.import_module, launch.RECIPES.values()):
        assert callable(module.main)
        assert callable(module.run)


def test_a_folder_of_weights_brings_its_tokenizer(tmp_path: Path) -> None:
    assert composed("model=pretrained", f"model.pretrained={tmp_path}").data.tokenizer == str(tmp_path)
    assert (
        composed("model=pretrained", "model.pretrained=folder", "data=text", "data.tokenizer=null").data.tokenizer
        is None
    )
    assert composed().data.tokenizer is None
    with pytest.raises(PlanError, match="is no tokenizer that can be read"):
        check(composed("model=pretrained", f"model.pretrained={tmp_path}"))
    train_tokenizer("some text and some more text " * 40, 280).save(str(tmp_path / "tokenizer.json"))
    check(composed("model=pretrained", f"model.pretrained={tmp_path}"))
    check(composed(f"data.tokenizer={tmp_path}"))
    with pytest.raises(PlanError, match=r"tokens, but the model's vocabulary 256: set data\.vocab_size"):
        check(composed(f"data.tokenizer={tmp_path}", "data.vocab_size=256"))
