"""Both packages that Lightning comes as, lightning.pytorch and pytorch_lightning, train the same with one import."""

import ast
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import join, weights
from fits import QUIET, State, Steps, mean_loss, share, tokens, worst
from pool import RankPool
from tiny import tiny
from torch import Tensor, nn

from lightning_afd import AFDStrategy, FlowMoEStrategy
from lightning_afd.callbacks import StepMonitor, TimelinePicture
from lightning_afd.namespace import MisconfigurationException, namespace_of
from lightning_afd.strategies.base import RankedStrategy

ROOT = Path(__file__).resolve().parents[2]
LIGHTNING, MIRROR = "lightning.pytorch", "pytorch_lightning"
TRAINERS = {"lightning", "pytorch_lightning", "lightning_fabric"}
STEPS = 3
NAMED, CHOSEN = None, {"attention": 2, "ffn": 1, "micro_batches": 2}
"""Trainer(strategy="afd"), and AFDStrategy with options."""


def batches() -> list[dict[str, Tensor]]:
    """Global batches without masked labels: their mean loss is that of any equal cut of them."""
    return [tokens(8, seed=seed, masked=False) for seed in range(STEPS)]


def module_of(package: str, **replaced: Any) -> Any:
    """The same ordinary LightningModule of either package."""

    class Small(import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = tiny(), []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = mean_loss(self.model(batch["input_ids"]).logits, batch["labels"])
            self.log("loss", loss)
            return loss

        def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("test_loss", mean_loss(self.model(batch["input_ids"]).logits, batch["labels"]))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

        def train_dataloader(self) -> Steps:
            own = self.trainer.strategy.distributed_sampler_kwargs
            return Steps([share(batch, own["num_replicas"], own["rank"]) for batch in batches()])

        test_dataloader = train_dataloader

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    return type("Small", (Small,), replaced)()


def trainer_of(package: str, options: dict[str, int] | None) -> Any:
    """A Trainer of the package, with the strategy by its name or by its options."""
    pl = import_module(package)
    return pl.Trainer(
        devices=2 if options is None else 3,
        strategy="afd" if options is None else AFDStrategy.of(package)(**options),
        plugins=[import_module(f"{package}.plugins.environments").LightningEnvironment()],
        callbacks=[StepMonitor.of(package)()],
        **{**QUIET, "accelerator": "cpu", "precision": "64-true"},
    )


def fit_test_fit(package: str, options: dict[str, int] | None) -> tuple[list[float], State, float]:
    """Train, test and train again in one script; returns losses (of an A rank), parameters and the test loss."""
    module = module_of(package)
    trainer_of(package, options).fit(module)
    tested = trainer_of(package, options)
    tested.test(module, verbose=False)
    again = trainer_of(package, options)
    again.fit(module)
    assert isinstance(again.strategy, AFDStrategy) and isinstance(again.strategy, strategy_of(package))
    assert again.callback_metrics["tokens_per_s"] > 0
    return module.losses, weights(module), float(tested.callback_metrics["test_loss"])


def strategy_of(package: str) -> Any:
    """Lightning's own base class."""
    return import_module(f"{package}.strategies").Strategy


def plain() -> tuple[list[float], State, float]:
    """The same as `fit_test_fit`, in a plain loop."""
    model = tiny().double()
    first = plain_epoch(model)
    with torch.no_grad():
        tested = [float(mean_loss(model(b["input_ids"]).logits, b["labels"])) for b in batches()]
    losses = first + plain_epoch(model)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    return losses, state, sum(tested) / len(tested)


def plain_epoch(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for batch in batches():
        optimizer.zero_grad()
        loss = mean_loss(model(batch["input_ids"]).logits, batch["labels"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [NAMED, CHOSEN], ids=["by name", "with options"])
def test_both_packages_train_as_the_plain_loop_does(pool: RankPool, options: dict[str, int] | None) -> None:
    losses, state, tested = plain()
    parts = {}
    for package in (MIRROR, LIGHTNING):
        ranks = pool.run(fit_test_fit, 2 if options is None else 3, package, options)
        assert all(rank[2] == ranks[0][2] for rank in ranks)
        parts[package] = ranks[0][0], join([rank[1] for rank in ranks]), ranks[0][2]
        assert parts[package][0] == pytest.approx(losses, rel=1e-12)
        assert parts[package][2] == pytest.approx(tested, rel=1e-12)
        difference, name = worst(parts[package][1], state)
        assert difference < 1e-12, name
    assert parts[MIRROR][0] == parts[LIGHTNING][0]
    assert worst(parts[MIRROR][1], parts[LIGHTNING][1])[0] == 0.0


def refused_by(package: str, other: str) -> tuple[str, bool]:
    """Fit what is refused, after both packages were imported; returns the error, and whether `package` knows it."""
    import_module(other)
    known = import_module(f"{package}.utilities.exceptions").MisconfigurationException
    try:
        trainer_of(package, NAMED).fit(module_of(package, automatic_optimization=False))
    except Exception as error:
        return str(error), isinstance(error, known)
    return "", False


@pytest.mark.parametrize(("package", "other"), [(MIRROR, LIGHTNING), (LIGHTNING, MIRROR)])
def test_refusals_are_the_users_own_exception_on_every_rank(pool: RankPool, package: str, other: str) -> None:
    for text, is_known in pool.run(refused_by, 2, package, other):
        assert "automatic_optimization=False" in text and is_known


def callback_refused(package: str) -> str:
    """Fit with a callback that is refused."""
    trainer = trainer_of(package, NAMED)
    trainer.callbacks.append(import_module(f"{package}.callbacks").WeightAveraging())
    try:
        trainer.fit(module_of(package))
    except import_module(f"{package}.utilities.exceptions").MisconfigurationException as error:
        return str(error)
    return ""


def test_refused_callbacks_are_those_of_the_users_package(pool: RankPool) -> None:
    for text in pool.run(callback_refused, 2, MIRROR):
        assert "does not support WeightAveraging" in text


ALONE = """
import sys
def trainers(): return sorted({"lightning", "pytorch_lightning", "lightning_fabric"} & set(sys.modules))
import lightning_afd
assert "torch" not in sys.modules and not trainers(), trainers()
from lightning_afd import AFDStrategy
from lightning_afd.callbacks import StepMonitor, TimelinePicture
assert not trainers(), trainers()
import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException
assert "afd" in pl.strategies.StrategyRegistry.available_strategies()
assert not [finder for finder in sys.meta_path if getattr(finder, "package", "") == "pytorch_lightning"]
options = dict(accelerator="cpu", devices=3, logger=False)
for strategy in (AFDStrategy(groups=2), AFDStrategy(attention=2, ffn=2)):
    try:
        pl.Trainer(strategy=strategy, **options)
    except MisconfigurationException as error:
        print(error)
callbacks = [StepMonitor(), TimelinePicture("x.png")]
trainer = pl.Trainer(strategy=AFDStrategy(attention=2, ffn=1), callbacks=callbacks, **options)
assert isinstance(trainer.strategy, (AFDStrategy, pl.strategies.ParallelStrategy))
assert all(isinstance(callback, pl.Callback) for callback in callbacks)
assert trainers() == ["lightning_fabric", "pytorch_lightning"], trainers()
"""


def test_a_user_of_the_mirror_never_loads_the_other_package() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}){ALONE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    by_groups, by_sizes = (line for line in done.stdout.splitlines() if "strategy afd" in line)
    assert "3 ranks into 2 group(s)" in by_groups
    assert "needs 4 ranks" in by_sizes


def test_with_both_packages_the_strategy_says_for_which_one_it_is() -> None:
    pl = import_module(MIRROR)
    for package in (LIGHTNING, MIRROR):
        names = import_module(f"{package}.strategies").StrategyRegistry.available_strategies()
        assert {"afd", "ep", "flowmoe"} <= set(names)
        collocated = import_module(package).Trainer(accelerator="cpu", devices=2, strategy="flowmoe", logger=False)
        assert type(collocated.strategy) is FlowMoEStrategy.of(package)
        chosen = AFDStrategy.of(package)
        assert type(chosen(ffn=1)) is chosen and namespace_of(chosen(ffn=1)).package == package
    assert isinstance(AFDStrategy(ffn=1), strategy_of(LIGHTNING))
    with pytest.raises(ValueError, match=r"for pytorch_lightning write AFDStrategy\.of\('pytorch_lightning'\)"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=AFDStrategy(ffn=1), logger=False)
    with pytest.raises(ValueError, match=r"package='keras': choose one of lightning\.pytorch, pytorch_lightning"):
        AFDStrategy.of("keras")


def test_users_may_inherit_from_the_strategy() -> None:
    class Own(AFDStrategy):
        strategy_name = "own"

    own = Own(attention=1, ffn=1)
    assert isinstance(own, Own) and isinstance(own, strategy_of(LIGHTNING)) and own.strategy_name == "own"
    assert isinstance(Own.of(MIRROR)(ffn=1), (Own, RankedStrategy, strategy_of(MIRROR)))


def test_exceptions_and_callbacks_survive_the_way_to_another_process() -> None:
    error = MisconfigurationException("devices=3")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == "devices=3"
    for package in (LIGHTNING, MIRROR):
        picture = TimelinePicture.of(package)("x.png", step=7)
        again = pickle.loads(pickle.dumps(picture))
        assert type(again) is type(picture) and vars(again) == vars(picture)
        assert again.state_key == "TimelinePicture"


def imports_at_run_time(source: str) -> set[str]:
    """Top-level names of the packages that a module imports anywhere, except for type checkers."""
    names, todo = set(), [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).split(".")[0])
        todo += ast.iter_child_nodes(node)
    return names


def test_strategies_and_callbacks_name_neither_package() -> None:
    files = [*(ROOT / "strategies").glob("*.py"), ROOT / "lightning_afd" / "callbacks.py"]
    found = {file.name: imports_at_run_time(file.read_text()) & TRAINERS for file in files}
    assert len(found) > 5 and not any(found.values()), f"use lightning_afd.namespace in {found}"


def test_the_check_of_imports_finds_them() -> None:
    typed = "if TYPE_CHECKING:\n    import lightning.pytorch as pl\n"
    assert imports_at_run_time(typed) == set()
    assert imports_at_run_time(f"{typed}else:\n    import pytorch_lightning") == {"pytorch_lightning"}
    assert imports_at_run_time("def f():\n    from lightning.fabric import x") == {"lightning"}


def test_other_objects_belong_to_neither_package() -> None:
    with pytest.raises(TypeError, match=r"dict inherits from no class of lightning\.pytorch or pytorch_lightning"):
        namespace_of({})
