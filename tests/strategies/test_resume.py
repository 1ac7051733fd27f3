"""Checkpoints of the same layout: bit-exact resume amid an epoch, refusals, and several runs of one module."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cases import join, weights
from fits import Batch, Model, Run, State, tiny_module, worst
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import RankPool
from torch import Tensor

from lightning_afd.checkpoint import CheckpointReader

SAVED = 3
TWO_GROUPS = Run(layout="1A+1F", groups=2)


@dataclass
class Tail:
    """Everything from step `SAVED` on that a resumed run must repeat bit for bit."""

    weights: State
    moments: list[Tensor]
    rates: list[float]
    losses: list[float]
    masks: list[Tensor]
    steps: int


class Saver(pl.Callback):
    """Saves in the middle of the epoch, and remembers each step behind it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        """Look at a step."""
        if trainer.global_step > SAVED:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            self.losses.append(float(outputs["loss"]))
        if trainer.global_step == SAVED and self.path is not None:
            trainer.save_checkpoint(self.path)


class Resumable(Model):
    """AdamW with a rate that changes with each step, and dropout whose masks are remembered."""

    def prepare(self) -> "Resumable":
        """Start to watch the dropout of the last layer."""
        self.masks: list[Tensor] = []
        self.model.layers[-1].dropout.register_forward_hook(lambda _m, _a, out: self.masks.append(out == 0))
        return self

    def configure_optimizers(self) -> Any:
        """A warm-up over 5 steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self.loss(batch), batch_size=len(batch["labels"]))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The likeliest next token."""
        return self.model(batch["input_ids"]).logits.argmax(-1)

    test_dataloader = predict_dataloader = Model.val_dataloader


def resumable(seed: int = 0, **sizes: Any) -> Resumable:
    """A seeded module with 6 batches."""
    module = tiny_module(steps=6, val_steps=2, seed=seed, **sizes)
    module.__class__ = Resumable
    return module.prepare()  # type: ignore[attr-defined, no-any-return]


def run_to_the_end(run: Run, saver: Saver, seed: int, start: Path | None) -> Tail:
    """Train one epoch, from a checkpoint if there is one."""
    torch.manual_seed(seed)
    module = resumable(seed, dropout=0.2)
    trainer = run.trainer(callbacks=[saver])
    trainer.fit(module, ckpt_path=start)
    moments = [state[key] for state in trainer.optimizers[0].state.values() for key in ("exp_avg", "exp_avg_sq")]
    masks = module.masks[-3 * run.micro_batches :]  # of the last 3 steps
    return Tail(weights(module), moments, saver.rates, saver.losses, masks, trainer.global_step)


def save_and_resume(run: Run, path: Path) -> tuple[Tail, Tail]:
    """An uninterrupted run, and one that starts from its checkpoint with other weights and random numbers."""
    return run_to_the_end(run, Saver(path), 0, None), run_to_the_end(run, Saver(None), 1, path)


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Tail, Tail]]]:
    """A checkpoint of 2A+2F after 3 of 6 steps, and both runs of all ranks."""
    path = tmp_path_factory.mktemp("checkpoints") / "middle.ckpt"
    return path, pool.run(save_and_resume, 4, Run(), path)


def assert_same_tail(through: Tail, resumed: Tail) -> None:
    """Three steps behind the checkpoint, bit for bit."""
    assert through.steps == resumed.steps == 6
    assert len(through.losses) == 3
    assert (resumed.losses, resumed.rates) == (through.losses, through.rates)
    assert resumed.weights.keys() == through.weights.keys()
    assert all(torch.equal(resumed.weights[name], value) for name, value in through.weights.items())
    for ours, theirs in ((resumed.moments, through.moments), (resumed.masks, through.masks)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_resume_in_the_middle_of_an_epoch_is_bit_exact(saved: tuple[Path, list[tuple[Tail, Tail]]]) -> None:
    _, ranks = saved
    for rank, (through, resumed) in enumerate(ranks):
        assert_same_tail(through, resumed)
        assert len(through.masks) == (6 if rank < 2 else 0)


def test_resume_of_collocated_ranks_is_bit_exact(pool: RankPool, tmp_path: Path) -> None:
    for through, resumed in pool.run(save_and_resume, 2, Run(layout="2flowmoe"), tmp_path / "middle.ckpt"):
        assert_same_tail(through, resumed)
        assert len(through.masks) == 6


def test_resume_with_two_groups_is_bit_exact(pool: RankPool, tmp_path: Path) -> None:
    """Layers 0 and 2, embedding and head on A group 0, layer 1 on A group 1; each has its experts on its F group."""
    path = tmp_path / "middle.ckpt"
    ranks = pool.run(save_and_resume, 4, TWO_GROUPS, path)
    for through, resumed in ranks:
        assert_same_tail(through, resumed)
    assert [len(through.masks) for through, _ in ranks] == [6, 0, 0, 0]
    one_group = pool.run(run_to_the_end, 2, Run(layout="1A+1F"), Saver(None), 0, None)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0].masks, one_group[0].masks, strict=True))
    assert ranks[0][0].losses == pytest.approx(one_group[0].losses, rel=1e-5)
    held = [set(through.weights) for through, _ in ranks]
    names = set(dict(resumable().named_parameters()))
    assert sum(map(len, held)) == len(set().union(*held)) == len(names) and names <= set(CheckpointReader(path).names())


def test_fewer_expert_ranks_leave_dropout_as_it_was(
    pool: RankPool, saved: tuple[Path, list[tuple[Tail, Tail]]]
) -> None:
    path, ranks = saved
    others = pool.run(run_to_the_end, 3, Run(layout="2A+1F"), Saver(None), 1, path)
    for (through, _), resumed in zip(ranks, others[:2], strict=False):
        assert resumed.losses == pytest.approx(through.losses, rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(resumed.masks, through.masks, strict=True))


def test_dropout_differs_between_replicas(saved: tuple[Path, list[tuple[Tail, Tail]]]) -> None:
    _, ranks = saved
    assert not any(torch.equal(a, b) for a, b in zip(ranks[0][0].masks, ranks[1][0].masks, strict=True))


def test_a_checkpoint_holds_each_parameter_once(saved: tuple[Path, list[tuple[Tail, Tail]]]) -> None:
    path, _ = saved
    files = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(files) == 4 and max(files) < 3 * min(files)  # replicas share the work
    whole = resumable(dropout=0.2).state_dict()
    reader = CheckpointReader(path)
    assert {name: reader.shape(name) for name in reader.names()} == {n: tuple(t.shape) for n, t in whole.items()}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def resume(run: Run, path: Path) -> None:
    """Try to go on from a checkpoint."""
    run.trainer().fit(resumable(dropout=0.2), ckpt_path=path)


def test_an_incomplete_checkpoint_is_refused(
    pool: RankPool, saved: tuple[Path, list[tuple[Tail, Tail]]], tmp_path: Path
) -> None:
    path = tmp_path / "half.ckpt"
    shutil.copytree(saved[0], path)
    (path / "meta.pt").unlink()
    for error in pool.try_run(resume, 4, Run(), path):
        assert error.type_name == "CheckpointError", error.traceback
        assert error.message == f"{path} is no complete checkpoint of strategy afd: meta.pt is missing"


def keep_the_best(run: Run, folder: Path) -> tuple[list[str], float, int, float]:
    """Checkpoints after every second step; test the best and resume from the last one."""
    module = resumable()
    best = ModelCheckpoint(
        folder, "{step}", monitor="train_loss", save_top_k=2, every_n_train_steps=2, save_last=True, mode="min"
    )
    trainer = run.trainer(callbacks=[best], enable_checkpointing=True)
    trainer.fit(module)
    kept = sorted(path.parent.name for path in folder.glob("*/meta.pt"))
    assert len(kept) == len(list(folder.iterdir()))
    (tested,) = trainer.test(module, ckpt_path="best", verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ckpt_path="last")
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.test(module, ckpt_path=folder / "after.ckpt", verbose=False)
    return kept, tested["test_loss"], trainer.global_step, float(best.best_model_score)


def test_best_and_last_and_removal(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(keep_the_best, 4, Run(), tmp_path)
    kept, loss, steps, best = ranks[0]
    assert kept == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert steps == 12 and loss > 0 and best > 0
    assert all(rank == ranks[0] for rank in ranks)


def several_runs(run: Run) -> tuple[State, list[dict[str, float]], list[Tensor | None]]:
    """Validate, fit, test, predict, and fit again with a fresh Trainer, all with one module."""
    module = resumable()
    options = {"limit_val_batches": 1.0}
    metrics = [*run.trainer(**options).validate(module, verbose=False)]
    trainer = run.trainer(**options)
    trainer.fit(module)
    metrics += trainer.validate(module, verbose=False)
    metrics += trainer.test(module, verbose=False)
    predictions = trainer.predict(module) or []
    run.trainer(**options).fit(module)
    metrics += run.trainer(**options).test(module, verbose=False)
    return weights(module), metrics, list(predictions)


@pytest.mark.parametrize("run", [Run(), TWO_GROUPS])
def test_one_module_in_several_runs(pool: RankPool, run: Run) -> None:
    reference, expected, predicted = pool.run(several_runs, 1, Run(layout="ref"))[0]
    ranks = pool.run(several_runs, 4, run)
    for _, metrics, _ in ranks:
        assert len(metrics) == len(expected) == 4
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    assert worst(join([rank[0] for rank in ranks]), reference)[0] <= 1e-5
    replicas = run.sizes[0]
    shares = [whole[replica::replicas] for whole in predicted for replica in range(replicas)]
    for _, _, predictions in ranks:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(predictions, shares, strict=True))


def change_the_layout() -> None:
    """Train a module that was split for another layout."""
    module = resumable()
    Run(layout="1A+3F").trainer().fit(module)
    Run(layout="2A+2F").trainer().fit(module)


def test_a_split_module_cannot_change_its_layout(pool: RankPool) -> None:
    for error in pool.try_run(change_the_layout, 4):
        assert error.type_name == "MisconfigurationException", error.traceback
        assert "was split for rank" in error.message and "build a new one" in error.message
