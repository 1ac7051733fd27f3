"""From a folder through training on separate ranks to a folder that transformers loads."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from cases import fit_apart, join, weights
from compiling import wrapped
from fits import Model, Run, State, tokens
from hub_cases import TIED, assert_equal, loaded, state_of, whole_model
from omegaconf import OmegaConf
from pool import RankPool
from safetensors.torch import load_file, save_file
from tiny import HF
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_afd import corpus, from_pretrained
from lightning_afd.errors import PlanError
from lightning_afd.recipes.export import run
from lightning_afd.recipes.module import MoELanguageModel


def export(**settings: Any) -> None:
    """What `lightning-afd export` does with these settings."""
    run(OmegaConf.create({"model": None, "config": None, "max_shard_size": "5GB", **settings}))


class FromFolder(Model):
    """A module that makes the model of a folder without storage."""

    def __init__(self, folder: Path) -> None:
        super().__init__(torch.nn.Identity(), [tokens(4, vocab=64, seed=seed) for seed in range(2)])
        self.optimizer = partial(torch.optim.SGD, lr=0.1)
        self.folder = folder

    def configure_model(self) -> None:
        """Called before each run."""
        if isinstance(self.model, torch.nn.Identity):
            with torch.device("meta"):
                self.model = from_pretrained(self.folder, experts_implementation="eager")


def train(folder: Path) -> dict[str, State]:
    """Two steps with two groups from each folder in `folder`, and a checkpoint of each."""
    held = {}
    for name in TIED:
        module = FromFolder(folder / name)
        fit_apart(module, 1, 1, p=2, R=2, precision="32-true").save_checkpoint(folder / f"{name}.ckpt")
        held[name] = weights(module)
    return held


def test_import_train_and_export(pool: RankPool, tmp_path: Path) -> None:
    before = {name: whole_model(name, tied=True) for name in TIED}
    for name, model in before.items():
        model.save_pretrained(tmp_path / name)
    ranks = pool.run(train, 4, tmp_path)
    for name in TIED:
        trained = join([rank[name] for rank in ranks])
        export(ckpt=str(tmp_path / f"{name}.ckpt"), out=str(tmp_path / "out" / name), max_shard_size="40KB")
        back = loaded(tmp_path / "out" / name)
        assert back.lm_head.weight is back.model.embed_tokens.weight
        assert_equal({f"model.{n}": p.detach() for n, p in back.named_parameters()}, trained)
        buffers = {n: b for n, b in before[name].named_buffers() if n in back.state_dict()}
        assert_equal({n: b for n, b in back.named_buffers() if n in buffers}, buffers)
        moved = [n for n, p in back.named_parameters() if not torch.equal(p, before[name].get_parameter(n))]
        assert len(moved) > len(trained) / 2


def train_one(folder: Path) -> None:
    """A fit from a folder that does not fit."""
    fit_apart(FromFolder(folder), 1, 2)


def test_a_missing_tensor_is_named_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    whole_model("qwen3_moe").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    del state[name]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for error in pool.try_run(train_one, 3, tmp_path):
        assert f"missing {name}" in error.message, error.traceback


# -- the recipe's module, on one device -----------------------------------------------------------------------------


class Words(L.LightningDataModule):
    """A few rows, and a tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = corpus.train_tokenizer("to be or not to be", 256)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The same rows."""
        return self.train_dataloader()

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Two batches."""
        ids = torch.randint(0, 64, (4, 6), generator=torch.Generator().manual_seed(0))
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)  # type: ignore[arg-type]


def recipe(**settings: Any) -> MoELanguageModel:
    """A tiny model of the recipes."""
    config = {"model_type": "qwen3_moe", **HF["qwen3_moe"]}
    return MoELanguageModel(**{"config": config, **settings})


def fit_recipe(module: MoELanguageModel, ckpt: Path) -> None:
    """One epoch and a checkpoint."""
    trainer = Run(layout="ref").trainer()
    trainer.fit(module, Words())
    trainer.save_checkpoint(ckpt)


def test_a_checkpoint_of_one_device_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    module, ckpt, out = recipe(), tmp_path / "one.ckpt", tmp_path / "out"
    fit_recipe(module, ckpt)
    export(ckpt=str(ckpt), out=str(out))
    assert_equal(state_of(loaded(out)), state_of(module.model))
    assert AutoTokenizer.from_pretrained(out).decode(Words().tokenizer.encode("not to be").ids) == "not to be"
    again = recipe(pretrained=str(out))
    again.configure_model()
    assert_equal(state_of(again.model), state_of(module.model))
    again.configure_model()
    fit_recipe(again, tmp_path / "two.ckpt")
    export(ckpt=str(tmp_path / "two.ckpt"), out=str(tmp_path / "two"))
    assert_equal(state_of(loaded(tmp_path / "two")), state_of(again.model))
    folder_says = recipe(pretrained=str(out), config={"router_aux_loss_coef": 0.5})
    folder_says.configure_model()
    assert folder_says.model.config.router_aux_loss_coef == 0.5 and folder_says.model.config.num_experts == 4
    with pytest.raises(PlanError, match=r"has the shape \[64, 32\] in the folder, and \[70, 32\] by the model's"):
        recipe(pretrained=str(out), config={"vocab_size": 70}).configure_model()


def test_a_checkpoint_that_does_not_say_its_model(tmp_path: Path) -> None:
    module = Model(whole_model("mixtral"), [tokens(2, vocab=64)])
    trainer = Run(layout="ref").trainer()
    trainer.fit(module)
    state = state_of(module.model)
    wrapped(module.model, "lm_head")  # names in the checkpoint get an _orig_mod
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    ckpt, out = str(tmp_path / "plain.ckpt"), str(tmp_path / "out")
    with pytest.raises(PlanError, match=r"does not say what model it holds: add config=<folder"):
        export(ckpt=ckpt, out=out)
    with pytest.raises(PlanError, match=r"is no folder with a config\.json"):
        export(ckpt=ckpt, out=out, config=str(tmp_path))
    module.model.config.save_pretrained(tmp_path)
    export(ckpt=ckpt, out=out, config=str(tmp_path))
    assert_equal(state_of(loaded(tmp_path / "out")), state)
    with pytest.raises(PlanError, match=r"missing model\.embed_tokens\.weight"):
        export(ckpt=ckpt, out=str(tmp_path / "other"), config=str(tmp_path), model="nothing")


def test_choosing_a_model(tmp_path: Path) -> None:
    from lightning_afd.model.hub_model import hub_entry

    pair = torch.nn.ModuleDict({name: whole_model(name) for name in ("mixtral", "olmoe")})
    torch.save({"state_dict": pair.state_dict(), "hub": hub_entry(pair)}, tmp_path / "pair.ckpt")
    for wrong in (None, "third"):
        with pytest.raises(PlanError, match=f"model={wrong} is not a choice; .*pair.ckpt holds mixtral, olmoe"):
            export(ckpt=str(tmp_path / "pair.ckpt"), out=str(tmp_path / "out"), model=wrong)
    export(ckpt=str(tmp_path / "pair.ckpt"), out=str(tmp_path / "out"), model="olmoe")
    assert_equal(state_of(loaded(tmp_path / "out")), state_of(pair["olmoe"]))
