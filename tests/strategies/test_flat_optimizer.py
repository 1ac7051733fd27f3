"""State divided in equal parts by DeepSpeed's ZeRO stage 1 is that of the plain optimizer, step by step.

Each case runs with a stand-in for DeepSpeed, and with DeepSpeed where it is installed.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Run, State, tiny_module
from flat_parts import FlatParts
from pool import RankErrors, RankPool, RemoteError
from sharding_cases import SAVED, Case, Grouped, Result, Watch, engine, engines, fit, joined, one, same
from torch import nn

from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies import deepspeed_zero
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.flat_optimizer import fragments
from lightning_afd.strategies.refusals import refuse_optimizer

RUN = Run(layout="2A+1F")
CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"scheduler": "lambda", "options": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 4}},
    "values": {"scheduler": "one cycle", "options": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}},
    "a step left out": {"scheduler": "plateau", "poison": True, "options": {"gradient_clip_val": 0.1}},
    "a hook of the user": {"scheduler": "sequential", "hook": True, "optimizer": torch.optim.RMSprop},
}


@engines
def test_numbers_are_those_of_the_plain_optimizer(pool: RankPool, sharding: str) -> None:
    cases = [Case(sharding=how, **options) for options in CASES.values() for how in ("none", sharding)]
    ranks = pool.run(fit, RUN.world, RUN, cases, timeout=300)
    for number, name in enumerate(CASES):
        for rank in ranks:
            plain, divided = rank[2 * number : 2 * number + 2]
            assert same(plain.weights, divided.weights) and plain.trail == divided.trail, name
            assert plain.rates == divided.rates and plain.names == divided.names, name
        check_parts([rank[2 * number] for rank in ranks], [rank[2 * number + 1] for rank in ranks])


def check_parts(plain: list[Result], divided: list[Result]) -> None:
    """Both A ranks together hold the state of one, exactly half of it each but for padding; F is as it was."""
    assert same(plain[2].state, divided[2].state)
    first, second = divided[0].state, divided[1].state
    assert first.keys().isdisjoint(second) and same(plain[0].state, {**first, **second})
    assert all(abs(part.kept - plain[0].kept / 2) <= 2 * 4 for part in divided[:2])
    assert divided[2].kept == plain[2].kept


@engines
def test_under_a_loss_scaler(pool: RankPool, sharding: str) -> None:
    options = {"gradient_clip_val": 0.1}
    cases = [Case(sharding=how, poison=True, scaled=True, options=options) for how in ("none", sharding)]
    for plain, divided in pool.run(fit, RUN.world, RUN, cases):
        assert same(plain.weights, divided.weights)


@engines
def test_checkpoints_go_from_one_sharding_and_layout_to_another(pool: RankPool, tmp_path: Path, sharding: str) -> None:
    shardings = ("none", "torch", sharding)
    paths = {how: tmp_path / f"{how}.ckpt" for how in shardings}
    whole = {how: one(pool.run(fit, 3, RUN, [Case(sharding=how, scheduler="lambda")], paths[how])) for how in shardings}
    plain = whole["none"]
    assert same(joined(whole[sharding], "saved", divided=True), plain[0].saved)
    for before, after in [(sharding, "none"), ("none", sharding), (sharding, "torch"), ("torch", sharding)]:
        case = Case(sharding=after, scheduler="lambda")
        ranks = one(pool.run(fit, 3, RUN, [case], None, paths[before]))
        assert all(rank.rates == plain[0].rates[SAVED:] for rank in ranks)
        assert all(same(rank.weights, other.weights) for rank, other in zip(ranks, plain, strict=True)), (before, after)
        assert same(joined(ranks, "started", divided=after != "none"), plain[0].saved)
    three = one(pool.run(fit, 4, Run(layout="3A+1F"), [Case(sharding=sharding)], None, paths[sharding]))
    assert same(joined(three, "started", divided=True), plain[0].saved)
    assert all(same(rank.weights, three[0].weights) for rank in three[1:3])


def _save_behind_the_fit(path: Path) -> list[State]:
    """Optimizer state at the end of a fit, and at the start of one that goes on from it."""
    module = tiny_module(steps=SAVED, tied=True, layers=2)
    module.__class__, module.case = Grouped, Case()  # type: ignore[assignment]
    before, after = Watch(), Watch()
    with engine("stand-in") as sharding:
        trainer = RUN.trainer({"optimizer_sharding": sharding}, callbacks=[before])
        trainer.fit(module)
        trainer.save_checkpoint(path)
        RUN.trainer({"optimizer_sharding": sharding}, callbacks=[after], max_epochs=2).fit(module, ckpt_path=path)
    return [before.ended, after.started]


def test_a_checkpoint_is_saved_behind_the_fit(pool: RankPool, tmp_path: Path) -> None:
    """The groups of the step are gone by then."""
    for ended, started in pool.run(_save_behind_the_fit, RUN.world, tmp_path / "end.ckpt"):
        assert ended and same(ended, started)


def _without_exchange() -> list[Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatParts, "exchange", lambda self, parts: None)
        return fit(RUN, [Case(sharding="stand-in")])


def test_without_the_exchange_replicas_go_apart(pool: RankPool) -> None:
    first, second, _ = (rank.weights for rank in one(pool.run(_without_exchange, RUN.world)))
    assert first.keys() == second.keys() and not any(torch.equal(first[name], second[name]) for name in first)


class Failing(Watch):
    """Rank 1 fails behind the third step; each rank saves when it hears of it, as OnExceptionCheckpoint does."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Between two steps, when there is state."""
        if trainer.global_step == SAVED and trainer.global_rank == 1:
            raise LookupError("boom")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """A rank that saves alone must not ask others for their part of a state."""
        assert self.path is not None
        trainer.save_checkpoint(self.path)


def _fit_failing(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sharding_cases.Watch", Failing)
        fit(RUN, [Case(sharding="stand-in")], path)


@pytest.mark.filterwarnings("ignore:no checkpoint is written")
def test_saving_on_an_exception_of_one_rank_does_not_hang(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.try_run(_fit_failing, RUN.world, tmp_path / "broken.ckpt")
    assert all(isinstance(error, RemoteError) for error in errors)
    assert [error.type_name for error in errors] == ["PeerFailure", "LookupError", "PeerFailure"]
    assert not (tmp_path / "broken.ckpt").exists()


class Odd(Grouped):
    """One matrix gets no gradient, or trains from the second step on."""

    what = ""

    def on_after_backward(self) -> None:
        """Before the norm is measured."""
        if self.what == "no gradient":
            self._matrix.grad = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Behind the division."""
        self._matrix.requires_grad_(self.what != "frozen" or batch_idx > 0)

    def configure_optimizers(self) -> Any:
        """Before the division."""
        self._matrix.requires_grad_(self.what != "frozen")
        return super().configure_optimizers()

    @property
    def _matrix(self) -> nn.Parameter:
        return self.model.lm_head.weight


def _fit_odd(what: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Odd, "what", what)
        patch.setattr("sharding_cases.Grouped", Odd)
        fit(RUN, [Case(sharding="stand-in")])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no gradient", r"group \d, of shape \[32, 16\], has no gradient in this step: use optimizer_sharding='torch'"),
        ("frozen", r"of shape \[32, 16\], was frozen when the fit began: use"),
    ],
)
def test_a_part_cannot_leave_parameters_out(pool: RankPool, what: str, said: str) -> None:
    with pytest.raises(RankErrors, match=said):
        pool.run(_fit_odd, RUN.world, what)


def test_every_number_lies_in_one_part() -> None:
    sizes = (3, 1, 7, 2, 5)
    parameters = [nn.Parameter(torch.arange(count, dtype=torch.float32)) for count in sizes]
    flat = torch.cat([parameter.detach() for parameter in parameters])
    for size in range(1, 21):
        found: list[float] = []
        for part in range(-(-sum(sizes) // size)):
            held = fragments(parameters, part, size)
            assert [f.place for f in held] == [sum(g.count for g in held[:n]) for n in range(len(held))]
            found += [x for f in held for x in f.parameter.tolist()[f.start : f.start + f.count]]
        assert found == flat.tolist()
        assert fragments(parameters, part + 1, size) == []


def test_optimizers_that_cannot_be_cut() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    refuse_optimizer(torch.optim.AdamW(parameters), "afd", "deepspeed", CPU)
    said = "Adafactor is not known to work: choose one of Adam, AdamW, .*SGD"
    with pytest.raises(MisconfigurationException, match=said) as caught:
        refuse_optimizer(torch.optim.Adafactor(parameters), "afd", "deepspeed", CPU)
    assert "\n" not in str(caught.value)


def test_other_weights_than_float32_are_refused() -> None:
    made = torch.optim.AdamW(nn.Linear(2, 1, dtype=torch.float64).parameters())
    refuse_optimizer(made, "afd", "torch", CPU)
    with pytest.raises(MisconfigurationException, match=r"one of shape \[1, 2\] is float64: choose precision 32-true"):
        refuse_optimizer(made, "afd", "deepspeed", CPU)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "which is not installed: run pip install 'lightning-afd.deepspeed.' or use optimizer_sharding='torch'"),
        ("0.20.1", r"works with deepspeed 0\.19\.x, but 0\.20\.1 is installed: run pip install"),
    ],
)
def test_deepspeed_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    monkeypatch.setattr(deepspeed_zero, "installed_version", lambda: version)
    AFDConfig(optimizer_sharding="torch")
    with pytest.raises(MisconfigurationException, match=said):
        AFDConfig(optimizer_sharding="deepspeed")
