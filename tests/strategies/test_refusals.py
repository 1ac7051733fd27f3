"""What cannot work is refused on every rank alike, with the numbers and the remedy, before anybody waits for a time-out."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Batch, Model, Run, tiny_module, tokens
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from pool import RankPool, RemoteError
from tiny import tiny
from torch import Tensor, nn

from lightning_afd import AFDStrategy

MISCONFIGURED, PLAN, PEER = "MisconfigurationException", "PlanError", "PeerFailure"


def rank() -> int:
    """Rank of this process."""
    return int(os.environ["RANK"])


def fit(module: pl.LightningModule, layout: str = "1A+1F", strategy: Any = None, **options: Any) -> None:
    """Train one epoch."""
    Run(layout=layout).trainer(strategy, **options).fit(module)


class Varied(Model):
    """A Model whose step, loader or optimizers a test replaces; every replacement gets the module first."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        module = tiny_module(steps=2)
        super().__init__(module.model, module.batches, aux=1.0)
        for name, function in replaced.items():
            setattr(self, name, function.__get__(self))


class NormBehindExperts(nn.Module):
    """A block whose output is no sum of the experts and something else."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block, self.norm = block, nn.LayerNorm(width)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Normalise what the experts return."""
        return self.norm(self.block(x_BSH))


class Unsized(torch.utils.data.IterableDataset[Batch]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[Batch]:
        return iter([tokens(4)])


def too_few_ranks() -> None:
    """A layout for 4 ranks on 3."""
    pl.Trainer(accelerator="cpu", devices=3, strategy=AFDStrategy(attention=2, ffn=2))


def too_many_ranks() -> None:
    """A layout for 2 ranks on 3."""
    pl.Trainer(accelerator="cpu", devices=3, strategy=AFDStrategy(attention=1, ffn=1))


def odd_world() -> None:
    """Halves of 3."""
    pl.Trainer(accelerator="cpu", devices=3, strategy="afd")


def one_rank() -> None:
    """Nothing to separate."""
    pl.Trainer(accelerator="cpu", devices=1, strategy="afd")


def no_attention_left() -> None:
    """All ranks given to experts."""
    pl.Trainer(accelerator="cpu", devices=2, strategy=AFDStrategy(ffn=2))


def more_chosen_than_experts() -> None:
    """k > E."""
    fit(tiny_module(experts=2, top_k=4))


def dense_model() -> None:
    """No routed experts anywhere."""
    fit(tiny_module(dense_first=3))


def more_ranks_than_experts() -> None:
    """An F rank without an expert."""
    fit(tiny_module(experts=2), "1A+3F")


def two_groups() -> None:
    """Interleaved groups, which the engine cannot train."""
    fit(tiny_module(), "1A+1F", {"groups": 2}, devices=4)


def manual_optimization() -> None:
    """backward() inside training_step."""
    module = tiny_module()
    module.automatic_optimization = False
    fit(module)


def lbfgs() -> None:
    """An optimizer that calls the step several times."""
    fit(Varied(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters())))


def two_optimizers() -> None:
    """One for the model, one for the rest."""

    def configure(self: Model) -> list[Any]:
        return [torch.optim.SGD(self.model.layers.parameters()), torch.optim.SGD(self.model.lm_head.parameters())]

    fit(Varied(configure_optimizers=configure))


def weight_averaging() -> None:
    """A callback that copies the module."""
    fit(tiny_module(), callbacks=[WeightAveraging()])


def stochastic_weight_averaging() -> None:
    """Another one."""
    fit(tiny_module(), callbacks=[StochasticWeightAveraging(swa_lrs=0.1)])


def unequal_plans() -> None:
    """Every rank has its own idea of the number of micro-batches."""
    fit(tiny_module(), "2A+2F", {"micro_batches": 1 + rank() // 2})


def unequal_layouts() -> None:
    """Every rank has its own idea of the layout."""
    fit(tiny_module(), strategy={"attention": 1 + rank(), "ffn": 3 - rank()}, devices=4)


def layer_that_is_not_additive() -> None:
    """A norm behind the experts."""
    module = tiny_module()
    module.model.layers[1].mlp = NormBehindExperts(module.model.layers[1].mlp, 16)
    fit(module, "2A+2F")


def batch_without_common_rows() -> None:
    """Tensors with different first dimensions, on A1 only."""
    module = tiny_module(steps=2)
    if rank() == 1:
        module.batches = [{**batch, "scale": torch.ones(3, 2)} for batch in module.batches]
    fit(module, "2A+2F")


def step_without_loss() -> None:
    """training_step returns None."""
    fit(Varied(training_step=lambda self, batch, batch_idx: self.loss(batch) and None), "2A+2F")


def step_with_a_vector() -> None:
    """training_step returns a loss per token."""
    fit(Varied(training_step=lambda self, batch, batch_idx: self.model(batch["input_ids"]).logits.mean(-1)), "2A+2F")


def stream_without_length() -> None:
    """An IterableDataset."""
    loader = torch.utils.data.DataLoader(Unsized(), batch_size=None)
    fit(Varied(train_dataloader=lambda self: loader), "2A+2F")


def model_outside_of_a_step() -> None:
    """The model is called in a hook."""
    fit(Varied(on_train_start=lambda self: self.model(tokens(2)["input_ids"])), "2A+2F")


def values_logged_by_one_rank_only() -> None:
    """A1 logs another name."""

    def step(self: Model, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log(f"loss_of_{rank()}", loss)
        return loss

    fit(Varied(training_step=step), "2A+2F")


def boom_in_a_step() -> None:
    """The user's own error on A1 in the second batch, between two MoE layers."""

    def step(self: Model, batch: Batch, batch_idx: int) -> Tensor:
        if rank() == 1 and batch_idx == 1:
            self.model.layers[2].register_forward_pre_hook(_boom)
        return self.loss(batch)

    fit(Varied(training_step=step), "2A+2F")


def boom_in_an_expert() -> None:
    """An error on F1."""
    module = tiny_module()
    if rank() == 3:
        module.model.layers[1].mlp.experts.act_fn = _boom
    fit(module, "2A+2F")


def boom_in_a_hook() -> None:
    """The user's own error on A1 while the others go on into the next step."""
    fit(Varied(on_train_batch_start=lambda self, batch, i: _boom() if rank() == 1 and i == 1 else None), "2A+2F")


def boom_at_start() -> None:
    """The user's own error on A1 before the first step."""
    fit(Varied(on_train_start=lambda self: _boom() if rank() == 1 else None), "2A+2F")


def _boom(*args: Any) -> Any:
    raise LookupError("boom")


SAME_ON_ALL = {
    too_few_ranks: (3, "needs 4 ranks", "Trainer has 3", "set devices=4"),
    too_many_ranks: (3, "needs 2 ranks", "Trainer has 3", "set devices=2"),
    odd_world: (3, "3 ranks into equal halves", "AFDStrategy(attention=2, ffn=1)"),
    one_rank: (1, "at least 2 ranks", "set devices=2"),
    no_attention_left: (2, "attention=0",),
    more_chosen_than_experts: (2, "4 of 2 experts", "top_k <= 2"),
    dense_model: (2, "no routed experts", "another strategy"),
    more_ranks_than_experts: (4, "ffn=3 F ranks for 2 experts", "ffn <= 2"),
    two_groups: (4, "groups=2", "use groups=1"),
    manual_optimization: (2, "automatic_optimization=False",),
    lbfgs: (2, "does not support LBFGS",),
    two_optimizers: (2, "2 optimizers", "one"),
    weight_averaging: (2, "WeightAveraging",),
    stochastic_weight_averaging: (2, "StochasticWeightAveraging",),
    unequal_plans: (4, "ranks 0 and 2", "micro_batches=1", "micro_batches=2", "same script and options"),
    unequal_layouts: (4, "different plans"),
    layer_that_is_not_additive: (4, "model.layers.1 is not additive", "another strategy"),
    batch_without_common_rows: (4, "[3, 4] rows", "afd_split"),
    step_without_loss: (4, "training_step returned NoneType", "return a loss of zero"),
    step_with_a_vector: (4, "training_step returned a tensor of shape [2, 8]", "scalar loss"),
    stream_without_length: (4, "dataloaders with a length", "__len__"),
    model_outside_of_a_step: (4, "called outside of a training"),
    values_logged_by_one_rank_only: (4, "log different values", "loss_of_0"),
}


def run(pool: RankPool, function: Callable[[], None], world: int) -> list[RemoteError]:
    """The errors of all ranks; a rank that went through fails the test."""
    answers = pool.try_run(function, world)
    assert all(isinstance(answer, RemoteError) for answer in answers), answers
    return answers


@pytest.mark.parametrize("function", SAME_ON_ALL, ids=lambda function: function.__name__)
def test_every_rank_gets_one_sentence(pool: RankPool, function: Callable[[], None]) -> None:
    world, *parts = SAME_ON_ALL[function]
    errors = run(pool, function, world)
    for error in errors:
        assert error.type_name in (MISCONFIGURED, PLAN), error.traceback
        assert all(part in error.message for part in parts), error.message
        assert "onnection" not in error.message


@pytest.mark.parametrize(
    ("function", "guilty", "place"),
    [
        (boom_in_a_step, 1, "rank 1 (A1) failed in A2f0: layer 2, micro-batch 0"),
        (boom_in_an_expert, 3, "rank 3 (F1) failed in E1f0: layer 1, micro-batch 0"),
        (boom_in_a_hook, 1, ""),
        (boom_at_start, 1, ""),
    ],
)
def test_the_first_cause_of_a_users_own_error(
    pool: RankPool, function: Callable[[], None], guilty: int, place: str
) -> None:
    for number, error in enumerate(run(pool, function, 4)):
        if number == guilty:
            assert (error.type_name, error.message) == ("LookupError", "boom")
            assert place in error.traceback
        else:
            assert error.type_name == PEER, error.traceback
            assert f"rank {guilty}" in error.message and "LookupError: boom" in error.message
            assert place in error.message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"order": "fastest"}, "choose one of"),
        ({"micro_batches": 0}, "at least 1"),
        ({"on_nonfinite": "ignore"}, "'error' or 'skip'"),
        ({"attention": 0, "ffn": 2}, "attention=0"),
    ],
)
def test_options_that_are_wrong_by_themselves(options: dict[str, Any], part: str) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as error:
        pl.Trainer(accelerator="cpu", devices=2, strategy=AFDStrategy(**options), logger=False)
    assert part in str(error.value)
