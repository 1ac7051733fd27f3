"""Models that are made in configure_model: first values without regard to the layout, loaded weights bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import weights
from fits import Batch, Model, Run, State, tokens
from pool import RankPool
from tiny import hf_config, tiny_hf
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_afd.model.lazy import without_storage
from lightning_afd.model.materialise import materialise
from lightning_afd.model.split import find_moe_layers

SEED = 7
ONE, TWO = Run(layout="1A+1F", precision="64-true"), Run(layout="2A+2F", precision="64-true")


def from_config(**overrides: Any) -> nn.Module:
    """An untrained transformers model."""
    from transformers import AutoModelForCausalLM

    config = hf_config("qwen3_moe", **overrides)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager", attn_implementation="eager")


def from_folder(folder: Path) -> nn.Module:
    """A trained one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", attn_implementation="eager")
    return model.train()


class Configured(Model):
    """The same module as everywhere, but its model is made in configure_model."""

    def __init__(self, build: Callable[[], nn.Module], train: list[Batch], val: list[Batch]) -> None:
        super().__init__(nn.Identity(), train, val)
        self.build, self.built, self.start = build, 0, State()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """As Lightning asks for it: nothing happens in a second call."""
        if self.built == 0:
            self.model, self.built = self.build(), 1

    def on_fit_start(self) -> None:
        """Keep what this rank starts with."""
        self.start = {**weights(self), **{n: b.clone() for n, b in self.named_buffers() if not b.is_meta}}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        """Keep the loss."""
        self.losses.append(float(outputs["loss"]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As in validation."""
        self.log("test_loss", self.loss(batch), batch_size=len(batch["labels"]))

    test_dataloader = Model.val_dataloader


@dataclass
class Result:
    """What one rank started with, and the losses of its run."""

    start: State
    losses: list[float]
    evaluated: list[float]


def module_of(build: Callable[[], nn.Module]) -> Configured:
    return Configured(
        build, [tokens(8, vocab=64, seed=s) for s in range(2)], [tokens(4, vocab=64, seed=9, masked=False)]
    )


def life(build: Callable[[], nn.Module], run: Run, groups: int = 1) -> Result:
    """Validate before any training, fit, test, and fit again with another Trainer."""
    torch.manual_seed(SEED)
    module = module_of(build)
    options = {"limit_val_batches": 1.0, "devices": groups * run.world}
    trainer = run.trainer({"groups": groups}, **options) if run.layout != "ref" else run.trainer(limit_val_batches=1.0)
    before = trainer.validate(module, verbose=False)[0]["val_loss"]
    trainer.fit(module)
    after = trainer.test(module, verbose=False)[0]["test_loss"]
    start = module.start
    again = run.trainer({"groups": groups}, **options) if run.layout != "ref" else run.trainer(limit_val_batches=1.0)
    again.fit(module)
    assert module.built == 1
    return Result(start, module.losses, [before, after])


def fit(build: Callable[[], nn.Module], run: Run) -> tuple[State, list[float]]:
    """What one rank starts with, and the losses of one fit."""
    module = module_of(build)
    run.trainer().fit(module)
    return module.start, module.losses


def whole(parts: list[State]) -> State:
    """Experts of all ranks in their order, everything else from its first rank."""
    names = dict.fromkeys(name for part in parts for name in part)
    held = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: torch.cat(found) if ".experts." in name else found[0] for name, found in held.items()}


def by_the_same_rule() -> nn.Module:
    """In one process: what all ranks together must start with."""
    with torch.device("meta"):
        model = from_config().double()
    root = nn.ModuleDict({"model": model})
    ids = {layer.experts: range(layer.num_experts) for layer in find_moe_layers(root)}
    materialise(root, ids, torch.device("cpu"), SEED)
    return model


@pytest.fixture(scope="module")
def alone() -> tuple[State, Result]:
    """First values and the life of the module in one process."""
    model = by_the_same_rule()
    tensors = (*model.named_parameters(), *model.named_buffers())
    state = {f"model.{name}": tensor.detach().clone() for name, tensor in tensors}
    return state, life(lambda: model, Run(layout="ref", precision="64-true"))


@pytest.mark.parametrize(("run", "groups"), [(TWO, 1), (ONE, 2)])
def test_fits_start_equal_on_every_layout(pool: RankPool, alone: tuple[State, Result], run: Run, groups: int) -> None:
    state, want = alone
    ranks = pool.run(life, groups * run.world, from_config, run, groups)
    start = whole([rank.start for rank in ranks])
    assert start.keys() == state.keys() and all(torch.equal(start[name], state[name]) for name in state)
    for rank in ranks[: run.sizes[0]]:
        assert rank.losses == pytest.approx(want.losses, rel=1e-9)
        assert rank.evaluated == pytest.approx(want.evaluated, rel=1e-9)
    assert want.losses[2] < want.losses[0] and want.evaluated[1] < want.evaluated[0]


def test_loaded_weights_are_those_of_the_folder(pool: RankPool, tmp_path: Path) -> None:
    saved = tiny_hf("qwen3_moe", seed=3)
    saved.save_pretrained(tmp_path)
    ranks = pool.run(fit, 2, partial(from_folder, tmp_path), Run(layout="1A+1F"))
    start = whole([start for start, _ in ranks])
    assert len(start) == len(list(saved.parameters())) + 2  # and two buffers of the rotary embedding
    for name, value in (*saved.named_parameters(), *saved.named_buffers()):
        assert torch.equal(start[f"model.{name}"], value), name
    _, losses = fit(partial(from_folder, tmp_path), Run(layout="ref"))
    assert ranks[0][1] == pytest.approx(losses, rel=1e-5)


class Constant(nn.Module):
    """Holds a number that nobody could make again."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(2.0)


def with_constant() -> nn.Module:
    model = from_config()
    model.model.layers[0].extra = Constant()
    return model


def with_own_values() -> nn.Module:
    model = from_config()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def with_lost_weights() -> nn.Module:
    model = from_config()
    model.lm_head.load_state_dict({"weight": torch.ones(64, 32, device="cpu")})
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (with_constant, ("factor of model.model.layers.0.extra", "make it in __init__")),
        (with_own_values, ("shape [64, 32] has no storage", "reset_parameters or _init_weights(module)")),
        (with_lost_weights, ("shape [64, 32] has no storage", "load_state_dict(..., assign=True)")),
    ],
)
def test_what_would_be_lost_is_refused(pool: RankPool, build: Callable[[], nn.Module], words: tuple[str, ...]) -> None:
    for error in pool.try_run(fit, 2, build, ONE):
        assert error.type_name == "PlanError" and all(word in error.message for word in words), error.message


class Peak(TorchDispatchMode):
    """The most bytes that tensors with storage held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


class Measured(Configured):
    """Measures from before its model is made until it is ready to train."""

    def setup(self, stage: str) -> None:
        """Comes before configure_model."""
        self.watch = Peak()
        self.watch.__enter__()

    def on_fit_start(self) -> None:
        """All that this rank holds is there."""
        self.watch.__exit__(None, None, None)


def peak_and_owned(run: Run, with_storage: bool) -> tuple[int, int]:
    """Peak of the set-up, and bytes of the parameters that this rank holds after it, both of this rank."""

    def build() -> nn.Module:
        with torch.device("cpu" if with_storage else "meta"):
            return from_config(moe_intermediate_size=256, num_experts=16)

    module = Measured(build, [tokens(8, vocab=64)], [])
    run.trainer().fit(module)
    return module.watch.peak, sum(p.nbytes for p in module.parameters() if not p.is_meta)


@pytest.mark.parametrize("with_storage", [False, True])
def test_nothing_that_others_own_is_materialised(pool: RankPool, with_storage: bool) -> None:
    run = Run(layout="1A+3F")
    with without_storage():
        model = from_config(moe_intermediate_size=256, num_experts=16)
    total = sum(p.nbytes for p in model.parameters())
    expert = 3 * 256 * 32 * 4
    for peak, held in pool.run(peak_and_owned, run.world, run, with_storage):
        assert held < total / 2
        if with_storage:
            assert peak >= total  # the measure sees what it is for
        else:
            assert held <= peak < held + 1.5 * expert
