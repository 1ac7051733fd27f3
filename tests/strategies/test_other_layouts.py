"""A checkpoint goes on under any other layout, and in and out of Lightning's single files, optimizer included."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Model, Run, State, tiny_module, worst
from lightning.pytorch.plugins.environments import LightningEnvironment
from pool import RankPool
from torch import Tensor, nn

from lightning_afd.checkpoint import CheckpointReader, read_whole
from lightning_afd.model.experts_module import rows_of
from lightning_afd.model.place import is_owned
from lightning_afd.placement import Groups

SAVED = 3
STEPS = 6
CLOSE = 1e-5
"""Relative difference of losses that remains after the sums of a few fp32 steps in another order."""


@dataclass
class Watch(pl.Callback):
    """Saves after step `SAVED`; remembers losses behind the start, and the state at the start and at the save."""

    path: Path | None = None
    losses: list[float] = field(default_factory=list)
    started: State = field(default_factory=dict)
    saved: State = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what was loaded."""
        self.started = held(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        """Look at a step."""
        self.losses.append(float(outputs["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[1]["lr"])
        if trainer.global_step == SAVED and self.path is not None:
            self.saved = held(pl_module, trainer.optimizers[0])
            trainer.save_checkpoint(self.path)


class Grouped(Model):
    """AdamW with two groups, whose order is not that of the parameters, and a rate that changes with each step."""

    def configure_optimizers(self) -> Any:
        """Matrices decay."""
        named = dict(self.named_parameters())
        decayed = [p for name, p in named.items() if "proj" in name or "qkv" in name]
        others = [p for p in named.values() if all(p is not other for other in decayed)]
        groups = [{"params": others}, {"params": decayed, "weight_decay": 0.3, "lr": 2e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def held(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """(expert numbers, copy) of all that a rank holds: weights, and optimizer state as `name/key`."""
    found = {}
    for name, parameter in module.named_parameters():
        if is_owned(parameter):
            rows = rows_of(parameter)
            experts = None if rows is None else rows.experts
            found[name] = (experts, parameter.detach().clone())
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = (experts if value.dim() else None, value.clone())
    return found


def whole(ranks: list[Any]) -> State:
    """What all ranks hold together."""
    joined: dict[str, dict[int, Tensor]] = {}
    result: State = {}
    for name, (experts, value) in (item for rank in ranks for item in rank.items()):
        if experts is None:
            assert torch.equal(result.setdefault(name, value), value), name
        else:
            joined.setdefault(name, {}).update(zip(experts, value, strict=True))
    return {**result, **{name: torch.stack([rows[e] for e in sorted(rows)]) for name, rows in joined.items()}}


def train(run: Run, watch: Watch, start: Path | None) -> Watch:
    """One epoch, from a checkpoint if there is one, which then overwrites a module with other weights."""
    module = tiny_module(steps=STEPS, seed=0 if start is None else 1, tied=True, experts=5)
    module.__class__ = Grouped
    run.trainer(callbacks=[watch]).fit(module, ckpt_path=start)
    return watch


def ddp(path: Path) -> Watch:
    """Lightning's own data-parallel strategy on two ranks."""
    module = tiny_module(steps=STEPS, tied=True, experts=5)
    module.__class__ = Grouped
    watch = Watch(path)
    strategy = "ddp_find_unused_parameters_true"
    options = {"strategy": strategy, "devices": 2, "plugins": [LightningEnvironment()], "callbacks": [watch]}
    Run(layout="ref").trainer(**options).fit(module)
    return watch


@dataclass(frozen=True)
class Origin:
    """One way to have come to step `SAVED`."""

    path: Path
    ranks: list[Watch]

    @property
    def state(self) -> State:
        """Everything at the save."""
        return whole([rank.saved for rank in self.ranks])


Origins = dict[str, Origin]


@pytest.fixture(scope="module")
def origins(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Origins:
    """Uninterrupted runs that save at step 3: a directory of 2A+2F, and files of one device and of DDP."""
    folder = tmp_path_factory.mktemp("origins")
    runs = {
        "afd": (4, partial(train, Run(), Watch(folder / "afd.ckpt"), None)),
        "alone": (1, partial(train, Run(layout="ref"), Watch(folder / "alone.ckpt"), None)),
        "ddp": (2, partial(ddp, folder / "ddp.ckpt")),
    }
    return {name: Origin(folder / f"{name}.ckpt", pool.run(_call, world, job)) for name, (world, job) in runs.items()}


def _call(job: Any) -> Any:
    return job()


def check(ranks: list[Watch], origin: Origin, expected: list[float]) -> None:
    """What was loaded is bit-equal to what was saved, and the steps behind it are those of `expected`."""
    want, got = origin.state, whole([rank.started for rank in ranks])
    assert got.keys() == want.keys() and len([name for name in got if name.endswith("/step")]) == 30
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    for rank in ranks:
        assert rank.losses == pytest.approx(expected, rel=CLOSE)
        assert rank.rates == origin.ranks[0].rates[-len(rank.rates) :]


def losses_of(origins: Origins) -> list[float]:
    """The losses of one device, step by step."""
    return origins["alone"].ranks[0].losses


def test_the_layouts_agree_without_interruption(origins: Origins) -> None:
    assert origins["afd"].ranks[0].losses == pytest.approx(losses_of(origins), rel=CLOSE)
    assert worst(origins["afd"].state, origins["alone"].state)[0] < 1e-2


@pytest.mark.parametrize(
    ("layout", "groups"),
    [("1A+1F", 1), ("1A+2F", 1), ("1A+1F", 2), ("1A+2F", (2, 1)), ("1A+1F", (1, 2)), ("2flowmoe", 1)],
)
def test_a_directory_goes_on_in_another_layout(pool: RankPool, origins: Origins, layout: str, groups: Groups) -> None:
    run, origin = Run(layout=layout, groups=groups), origins["afd"]
    check(pool.run(train, run.world, run, Watch(), origin.path), origin, losses_of(origins)[SAVED:])


@pytest.mark.parametrize(("layout", "groups"), [("1A+1F", 2), ("1A+1F", (2, 1)), ("2flowmoe", 1)])
def test_a_directory_comes_back_from_several_groups(
    pool: RankPool, origins: Origins, layout: str, groups: Groups, tmp_path: Path
) -> None:
    run, path = Run(layout=layout, groups=groups), tmp_path / "back.ckpt"
    origin = Origin(path, pool.run(train, run.world, run, Watch(path), None))
    check(pool.run(train, 4, Run(), Watch(), path), origin, losses_of(origins)[SAVED:])


def test_uneven_data_parallel_sizes(pool: RankPool, origins: Origins) -> None:
    ranks = pool.run(train, 4, Run(layout="3A+1F"), Watch(), origins["afd"].path)
    check(ranks, origins["afd"], losses_of(origins)[SAVED:])


@pytest.mark.parametrize("name", ["alone", "ddp"])
def test_a_file_of_lightning_goes_on(pool: RankPool, origins: Origins, name: str) -> None:
    ranks = pool.run(train, 4, Run(), Watch(), origins[name].path)
    losses = losses_of(origins)[SAVED:] if name == "alone" else ranks[0].losses
    check(ranks, origins[name], losses)


def test_a_directory_becomes_a_file(pool: RankPool, origins: Origins, tmp_path: Path) -> None:
    path = tmp_path / "whole.ckpt"
    torch.save(read_whole(origins["afd"].path), path)
    check(pool.run(train, 1, Run(layout="ref"), Watch(), path), origins["afd"], losses_of(origins)[SAVED:])


def test_the_reader_gives_global_tensors_one_by_one(origins: Origins) -> None:
    reader, state = CheckpointReader(origins["afd"].path), origins["afd"].state
    name = "model.layers.1.mlp.experts.down_proj"
    assert reader.shape(name) == (5, 16, 8) and reader.dtype(name) == torch.float32
    assert torch.equal(reader.read({name: None})[name], state[name])
    tied = reader.read({"model.lm_head.weight": None, "model.embedding.weight": None})
    assert torch.equal(tied["model.lm_head.weight"], tied["model.embedding.weight"])


def validate(run: Run, start: Path) -> float:
    """The loss of weights from a checkpoint; other random numbers must not be touched by it."""
    module = tiny_module(val_steps=2, seed=1, tied=True, experts=5)
    before = torch.get_rng_state()
    (metrics,) = run.trainer(limit_val_batches=1.0).validate(module, ckpt_path=start, verbose=False)
    if run.layout == "1A+1F":
        assert torch.equal(torch.get_rng_state(), before)
    return float(metrics["val_loss"])


def test_validation_of_a_directory_in_another_layout(pool: RankPool, origins: Origins, tmp_path: Path) -> None:
    torch.save(read_whole(origins["afd"].path), tmp_path / "whole.ckpt")
    (expected,) = pool.run(validate, 1, Run(layout="ref"), tmp_path / "whole.ckpt")
    assert pool.run(validate, 2, Run(layout="1A+1F"), origins["afd"].path) == pytest.approx([expected] * 2, rel=CLOSE)
