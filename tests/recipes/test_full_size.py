"""Recipes of full-size models: they fit their clusters by the planner's model, and their twins train."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig
from pool import RankPool
from torch import Tensor

from lightning_afd.errors import PlanError
from lightning_afd.model.experts import Projection
from lightning_afd.model.place import owned_bytes, owned_parameters
from lightning_afd.recipes.footprint import footprints, job_of
from lightning_afd.recipes.pretrain import check, trainer_settings

FOLDER = Path(__file__).parents[2] / "conf" / "recipe"
TWINS = sorted(path.stem for path in FOLDER.glob("*_tiny.yaml"))
FULL = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in TWINS)
MODELS = {"deepseek_moe_16b", "deepseek_v2_lite", "deepseek_v3", "gpt_oss_120b", "gpt_oss_20b"}
MODELS |= {"qwen3_235b_a22b", "qwen3_30b_a3b"}


def composed(recipe: str, *overrides: str) -> DictConfig:
    with initialize_config_module(version_base="1.3", config_module="lightning_afd.conf"):
        config = compose("config", [f"recipe={recipe}", "output_dir=here", *overrides])
    return config


def test_each_full_size_model_has_a_recipe_and_a_twin() -> None:
    assert set(FULL) == MODELS
    assert {f"{recipe}_tiny" for recipe in FULL} == set(TWINS)


@pytest.mark.parametrize("recipe", FULL)
def test_a_full_size_recipe_fits_its_cluster(recipe: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text", encoding="utf-8")
    config = composed(recipe, f"data.files=[{text}]")
    check(config)
    job = job_of(config)
    assert config.devices == job.cluster.devices_per_node == config.trainer.devices
    assert job.layout.world == config.devices * config.trainer.num_nodes == job.cluster.devices
    assert (config.trainer.accelerator, config.trainer.precision) == ("gpu", "bf16-mixed")
    assert (config.data.packing, config.data.seq_len) == ("documents", 4096)
    assert config.data.seq_len <= config.model.config.max_position_embeddings
    assert config.data.vocab_size <= config.model.config.vocab_size
    assert config.data.batch_size == config.strategy.micro_batches
    rows = job.layout.attention * config.data.batch_size * config.trainer.get("accumulate_grad_batches", 1)
    assert 480 <= rows <= 560
    limit = job.cluster.device.memory_bytes
    most = max(memory.total for memory in footprints(config).values())
    assert limit / 2 < most <= limit  # it would not fit into half of the memory


def test_a_recipe_that_does_not_fit_is_one_sentence() -> None:
    recipe = composed("deepseek_moe_16b", "data.files=[a]", "cluster.device.memory_gb=70")
    with pytest.raises(
        PlanError, match=r"of the 64\.4 GB that a H800.* has for a job, .* need more: F0 7\d\.\d GB; use more"
    ):
        footprints(recipe)


def test_a_full_size_recipe_asks_for_a_text() -> None:
    with pytest.raises(PlanError, match=r"data\.files must be given"):
        check(composed("qwen3_30b_a3b"))


SAME = ("order", "recompute", "recompute_experts", "shared_experts", "optimizer_sharding")


@pytest.mark.parametrize("recipe", FULL)
def test_a_twin_trains_as_its_full_size_does(recipe: str) -> None:
    full, twin = composed(recipe, "data.files=[a]"), composed(f"{recipe}_tiny")
    assert [full.strategy[key] for key in SAME] == [twin.strategy[key] for key in SAME]
    assert full.strategy.get("expert_bias_rate") == twin.strategy.get("expert_bias_rate")
    assert full.model.config.model_type == twin.model.config.model_type
    assert (full.trainer.precision, full.data.packing) == (twin.trainer.precision, twin.data.packing)
    assert twin.trainer.accelerator == "cpu" and twin.devices <= 4
    check(twin)


def train(recipe: str, text: str, cache: str) -> tuple[float, dict[str, int]]:
    """Two steps of a twin on this rank: the last loss, and the bytes that the rank then holds."""
    config = composed(recipe, f"data.files=[{text}]", f"data.cache_dir={cache}", "trainer.max_steps=2")
    quiet = {"callbacks": [], "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {**trainer_settings(config), **quiet, "limit_val_batches": 0}
    settings["strategy"] = {**settings["strategy"], "trace": 0}
    projections: list[Projection] = []
    initialise = Projection.__init__

    def noting(self: Projection, *args: Any) -> None:
        initialise(self, *args)
        projections.append(self)

    with patch.object(Projection, "__init__", noting):
        datamodule, module = (instantiate(part, _convert_="all") for part in (config.data, config.model))
        trainer = instantiate(settings, _convert_="all")
        trainer.fit(module, datamodule)
    copies = [copy for projection in projections for _, copy in projection._copies.values()]
    states = trainer.optimizers[0].state.values()
    held = {
        "weights": owned_bytes(module) + nbytes(copies),
        "gradients": nbytes(parameter for _, parameter in owned_parameters(module)),
        "optimizer": nbytes(state[key] for state in states for key in ("exp_avg", "exp_avg_sq")),
    }
    return float(trainer.callback_metrics["train_loss"]), held


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("recipe", TWINS)
def test_a_twin_trains_and_holds_what_the_planner_counts(pool: RankPool, tmp_path: Path, recipe: str) -> None:
    """Parameters, their copies in bfloat16 on FFN ranks, AdamW's state; gradients are as large as parameters."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n\n".join(f"Sheep {n} has {n * n} lambs. " * (1 + n % 9) for n in range(300)), encoding="utf-8")
    config = composed(recipe)
    layout, counted = job_of(config).layout, footprints(config)
    ranks = pool.run(train, layout.world, recipe, str(text), str(tmp_path / "cache"), timeout=200)
    losses = {loss for loss, _ in ranks}
    assert len(losses) == 1 and 4 < losses.pop() < 8
    for rank, (_, held) in enumerate(ranks):
        memory = asdict(counted[layout.worker_of(rank)])
        assert held == {kind: pytest.approx(memory[kind], rel=0.02) for kind in held}
