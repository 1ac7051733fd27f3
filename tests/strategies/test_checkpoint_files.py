"""Checkpoints as files: ModelCheckpoint's variants, what is never chosen, what is refused and in which words."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Model, Run, tiny_module
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from pool import RankPool, RemoteError

from lightning_afd.checkpoint import CheckpointReader, open_checkpoint, read_whole
from lightning_afd.errors import CheckpointError
from lightning_afd.strategies import checkpoints

RUN = Run(layout="1A+1F")


class Module(Model):
    """With hyperparameters, which go into the checkpoint as they are."""

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Keeper(ModelCheckpoint):
    """Several in one Trainer."""

    @property
    def state_key(self) -> str:
        return str(self.dirpath)


class Strange:
    """What only unpickling loads."""


def module(steps: int = 6, **hyperparameters: Any) -> Module:
    """A module with so many batches."""
    made = tiny_module(steps=steps, val_steps=1)
    made.__class__ = Module
    made._set_hparams(hyperparameters)
    return made  # type: ignore[return-value]


def train(made: Module, *callbacks: pl.Callback, start: Any = None, **options: Any) -> pl.Trainer:
    """Fit on 1A + 1F."""
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = RUN.trainer(callbacks=list(callbacks), enable_checkpointing=saves, **options)
    trainer.fit(made, ckpt_path=start)
    return trainer


def variants(folder: Path) -> dict[str, list[str]]:
    """What each kind of ModelCheckpoint leaves behind."""
    made = module(steps=4)
    keep: dict[str, dict[str, Any]] = {
        "top": {"monitor": "train_loss", "mode": "max", "save_top_k": 2, "filename": "{step}"},
        "linked": {"save_last": "link", "save_top_k": 1, "filename": "{step}", "monitor": "step", "mode": "max"},
        "versions": {"monitor": "step", "mode": "max", "save_top_k": 2, "filename": "same", "save_last": True},
        "overwritten": {"save_top_k": 1, "filename": "same", "enable_version_counter": False},
        "weights": {"save_top_k": 1, "save_weights_only": True, "filename": "{step}"},
    }
    every = {"every_n_train_steps": 2}
    callbacks = [Keeper(folder / name, **{**every, **options}) for name, options in keep.items()]
    train(made, *callbacks)
    return {name: sorted(path.name for path in (folder / name).iterdir()) for name in keep}


def test_variants_of_model_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    left = pool.run(variants, 2, tmp_path)[0]
    assert len(left.pop("top")) == 2
    assert left == {
        "linked": ["last.ckpt", "step=4.ckpt"],
        "versions": ["last.ckpt", "same-v1.ckpt", "same.ckpt"],
        "overwritten": ["same.ckpt"],
        "weights": ["step=4.ckpt"],
    }
    assert (tmp_path / "linked" / "last.ckpt").is_symlink()
    for path in tmp_path.glob("*/*.ckpt"):
        assert CheckpointReader(path).checkpoint["global_step"] in (2, 4), path
    steps = {p.stem: CheckpointReader(p).checkpoint["global_step"] for p in (tmp_path / "versions").iterdir()}
    assert steps == {"same": 2, "same-v1": 4, "last": 4}
    assert CheckpointReader(tmp_path / "weights" / "step=4.ckpt").optimizers is None


class BreakingDown(pl.Callback):
    """A save that ends half-way, as a killed process would."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Break from step 4 on."""
        if trainer.global_step == 3:
            checkpoints.write_meta = _fail  # type: ignore[attr-defined]


def _fail(*_: Any) -> None:
    raise OSError("no space left")


def break_down(folder: Path) -> None:
    """Two checkpoints are wanted; the second is cut."""
    original = checkpoints.write_meta
    try:
        train(module(), ModelCheckpoint(folder, every_n_train_steps=2, save_last=True), BreakingDown())
    finally:
        checkpoints.write_meta = original


def go_on(folder: Path) -> tuple[int, list[str]]:
    """Resume from the last one."""
    keeper = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
    seen: list[int] = []
    start = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, _: seen.append(trainer.global_step))
    train(module(), keeper, start, start="last")
    return seen[0], sorted(path.name for path in folder.iterdir())


def test_a_half_written_checkpoint_is_never_the_last(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.try_run(break_down, 2, tmp_path)
    assert all(isinstance(answer, RemoteError) and "no space left" in answer.message for answer in answers), answers
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-step=2.ckpt", "last.ckpt"]
    hidden = [path for path in tmp_path.iterdir() if path.name.startswith(".afd-")]
    assert len(hidden) == 1 and list(hidden[0].glob("*.distcp")) and not (hidden[0] / "meta.pt").exists()
    step, names = pool.run(go_on, 2, tmp_path)[0]
    assert step == 2
    assert [name for name in names if not name.startswith(".")] == ["epoch=0-step=6.ckpt", "last.ckpt"]


def save_one(path: Path, **hyperparameters: Any) -> None:
    """A checkpoint after 2 steps, with notes."""
    saver = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: _save_at_2(trainer, path))
    train(module(**hyperparameters), saver)


def _save_at_2(trainer: pl.Trainer, path: Path) -> None:
    if trainer.global_step == 2:
        trainer.strategy.checkpoint_notes["bytes of a reduce chunk"] = 4096  # type: ignore[attr-defined]
        trainer.save_checkpoint(path)


def load(path: Path, experts: int = 4, weights_only: bool = True) -> dict[str, Any]:
    """Go on from a checkpoint; returns the notes."""
    made = tiny_module(steps=6, experts=experts)
    made.__class__ = Module
    trainer = RUN.trainer({"weights_only": weights_only})
    trainer.fit(made, ckpt_path=path)
    return dict(trainer.strategy.checkpoint_notes)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    path = tmp_path_factory.mktemp("saved") / "one.ckpt"
    pool.run(save_one, 2, path)
    return path


def test_notes_and_maps_travel_with_a_checkpoint(pool: RankPool, saved: Path) -> None:
    notes = {"bytes of a reduce chunk": 4096}
    assert pool.run(load, 2, saved) == [notes, notes]
    afd = CheckpointReader(saved).afd
    sizes = {"attention": 1, "ffn": 1, "groups": 1}
    kind = {"head": "attention", "collocated": False, "neighbours": "roles", "node_ranks": 1}
    assert afd["layout"] == sizes | kind
    assert afd["expert_maps"] == [{"expert_to_rank": (0, 0, 0, 0), "version": 0}] * 3


def words(pool: RankPool, *args: Any) -> list[str]:
    """The refusals of both ranks, one of which may name the other."""
    answers = pool.try_run(load, 2, *args)
    assert all(isinstance(answer, RemoteError) for answer in answers), answers
    return [f"{answer.type_name}: {answer.message}" for answer in answers]


def test_other_models_are_refused_by_name(pool: RankPool, saved: Path) -> None:
    for text in words(pool, saved, 6):
        assert "CheckpointError" in text and "the checkpoint holds model.layers." in text
        assert "with shape [4, 16" in text and "this model with [6, 16" in text


def test_more_than_plain_values_needs_the_users_word(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "strange.ckpt"
    pool.run(save_one_strange, 2, path)
    for text in words(pool, path):
        assert "holds more than tensors and plain values" in text and "AFDStrategy(weights_only=False)" in text
        assert "Strange" in text
    pool.run(load, 2, path, 4, False)


def save_one_strange(path: Path) -> None:
    """With a hyperparameter that is an object."""
    save_one(path, thing=Strange())


def test_a_plain_file_of_it_starts_a_module_without_any_strategy(saved: Path, tmp_path: Path) -> None:
    whole = read_whole(saved)
    assert whole["global_step"] == 2 and whole["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"done": 2}]
    made, reader = module(), CheckpointReader(saved)
    made.load_state_dict(whole["state_dict"])
    made.configure_optimizers().load_state_dict(whole["optimizer_states"][0])
    assert all(torch.equal(reader.read({name: None})[name], value) for name, value in made.state_dict().items())


def test_what_is_no_checkpoint_is_said(saved: Path, tmp_path: Path) -> None:
    def refused(path: Path, sentence: str) -> None:
        with pytest.raises(CheckpointError, match=sentence):
            open_checkpoint(path)

    refused(tmp_path / "none.ckpt", "none.ckpt does not exist")
    refused(tmp_path, "is no complete checkpoint of strategy afd: meta.pt is missing")
    for name, text in {"text.ckpt": "hello", "empty.ckpt": ""}.items():
        (tmp_path / name).write_text(text)
        refused(tmp_path / name, f"{name} is no checkpoint that torch can read")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    refused(tmp_path / "other.ckpt", "is no checkpoint of Lightning: it has no state_dict")
    older = tmp_path / "older.ckpt"
    shutil.copytree(saved, older)
    torch.save({"format": 1, "layout": {}, "world": 2}, older / "meta.pt")
    refused(older, "has format 1, but this version of lightning-afd reads format 2: load it with the version that")
    shutil.copy(saved / "meta.pt", older / "meta.pt")
    (older / ".metadata").unlink()
    refused(older, "holds no tensors: .metadata is missing")


def use_plugin() -> None:
    """Train with a plugin for checkpoints."""
    trainer = RUN.trainer()
    trainer.strategy.checkpoint_io = AsyncCheckpointIO(TorchCheckpointIO())
    trainer.fit(module())


def save_far_away() -> None:
    """Save to a place that is no folder."""
    trainer = train(module(steps=1))
    trainer.save_checkpoint("s3://bucket/one.ckpt")


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (save_far_away, "a file system that all ranks share, but got s3://bucket"),
        (use_plugin, "strategy afd writes its checkpoints itself and cannot use AsyncCheckpointIO"),
    ],
)
def test_what_cannot_hold_a_checkpoint_is_refused(pool: RankPool, job: Any, sentence: str) -> None:
    for error in pool.try_run(job, 2):
        assert isinstance(error, RemoteError) and sentence in error.message, error
