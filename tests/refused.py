"""Runs that cannot work: each is a job of the rank pool that must end in an error on every rank."""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from fits import Batch, Model, Run, Steps, share, tiny_module, tokens
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_afd import AFDStrategy, EPStrategy, FlowMoEStrategy


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


def too_few_ranks() -> None:
    """A layout for 4 ranks on 3."""
    pl.Trainer(accelerator="cpu", devices=3, strategy=AFDStrategy(attention=2, ffn=2))


def too_many_ranks() -> None:
    """A layout for 2 ranks on 3."""
    pl.Trainer(accelerator="cpu", devices=3, strategy=AFDStrategy(attention=1, ffn=1))


def too_many_groups() -> None:
    """Two groups of each role on 3 ranks."""
    pl.Trainer(accelerator="cpu", devices=3, strategy=AFDStrategy(groups=2))


def one_rank() -> None:
    """Nothing to separate, and no fallback."""
    pl.Trainer(accelerator="cpu", devices=1, strategy=AFDStrategy(fallback="error"))


def one_rank_with_two_groups() -> None:
    """A fallback that has no groups."""
    pl.Trainer(accelerator="cpu", devices=1, strategy=AFDStrategy(groups=2))


def one_rank_with_shared_experts_apart() -> None:
    """A fallback that has no F ranks, found out once there is a model."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=AFDStrategy(shared_experts="ffn"), logger=False)
    trainer.fit(tiny_module(shared_expert=True))


def collocated_with_groups() -> None:
    """An option of separate ranks."""
    pl.Trainer(accelerator="cpu", devices=2, strategy=EPStrategy(groups=2, head="ffn"))


def collocated_with_another_order() -> None:
    """An order of separate ranks."""
    pl.Trainer(accelerator="cpu", devices=2, strategy=FlowMoEStrategy(order="af-pipe"))


def fewer_experts_than_collocated_ranks() -> None:
    """A rank without an expert."""
    fit(tiny_module(experts=2), "3ep")


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


def compiled_step() -> None:
    """A graph around the whole step."""
    module = tiny_module()
    module.training_step = torch.compile(module.training_step, backend="eager")  # type: ignore[method-assign]
    fit(module)


def compiled_experts() -> None:
    """A graph of the experts themselves."""
    module = tiny_module()
    module.model.layers[1].mlp.experts.compile(backend="eager")
    fit(module)


def compiled_model() -> None:
    """A graph around all layers."""
    module = tiny_module()
    module.model = torch.compile(module.model, backend="eager")
    fit(module)


def compiled_in_place() -> None:
    """A graph around the LightningModule."""
    module = tiny_module()
    module.compile(backend="eager")
    fit(module)


def weight_averaging() -> None:
    """A callback that copies the module."""
    fit(tiny_module(), callbacks=[WeightAveraging()])


def stochastic_weight_averaging() -> None:
    """Another one."""
    fit(tiny_module(), callbacks=[StochasticWeightAveraging(swa_lrs=0.1)])


def learning_rate_finder() -> None:
    """A callback that trains for a while and goes back."""
    fit(tiny_module(), callbacks=[LearningRateFinder()])


def synchronised_batch_norm() -> None:
    """Statistics over ranks inside of a layer."""
    fit(tiny_module(), sync_batchnorm=True)


def metric_that_waits() -> None:
    """A metric that talks to other ranks in each step."""
    module = tiny_module()
    module.mean = MeanMetric(dist_sync_on_step=True)
    fit(module)


def sparse_embedding() -> None:
    """Gradients that hold only the rows that were used."""
    module = tiny_module()
    module.model.embedding = torch.nn.Embedding(32, 16, sparse=True)
    fit(module)


def unequal_plans() -> None:
    """Every rank has its own idea of the number of micro-batches."""
    fit(tiny_module(), "2A+2F", {"micro_batches": 1 + rank() // 2})


def unequal_layouts() -> None:
    """Every rank has its own idea of the layout."""
    fit(tiny_module(), strategy={"attention": 1 + rank() // 2, "ffn": 3 - rank() // 2}, devices=4)


def unequal_shardings() -> None:
    """Some ranks would wait for others in the first optimizer step."""
    fit(tiny_module(), "2A+1F", {"optimizer_sharding": "torch" if rank() == 1 else "none"})


def unequal_verdicts() -> None:
    """Every rank has its own idea of what is done about gradients that are not finite."""
    fit(tiny_module(), "1A+1F", {"on_nonfinite": "skip" if rank() == 1 else "error"})


def layer_that_is_not_additive() -> None:
    """A norm behind the experts, in a model that is spread over two groups."""
    module = tiny_module()
    module.model.layers[1].mlp = NormBehindExperts(module.model.layers[1].mlp, 16)
    fit(module, strategy={"attention": 1, "ffn": 1, "groups": 2}, devices=4)


def batch_without_common_rows() -> None:
    """Tensors with different first dimensions, on A1 only."""
    module = tiny_module(steps=2)
    if rank() == 1:
        module.batches = [{**batch, "scale": torch.ones(3, 2)} for batch in module.batches]
    fit(module, "2A+1F")


def step_without_loss() -> None:
    """training_step returns None."""
    fit(Varied(training_step=lambda self, batch, batch_idx: self.loss(batch) and None), "2A+1F")


def step_with_a_vector() -> None:
    """training_step returns a loss per token."""
    fit(Varied(training_step=lambda self, batch, batch_idx: self.model(batch["input_ids"]).logits.mean(-1)), "2A+1F")


class Liar(Steps):
    """Promises one batch more than it has."""

    def __len__(self) -> int:
        """Too many."""
        return len(self.batches) + 1


def loader_that_ends_early() -> None:
    """A wrong length, on A1 only."""

    def loader(self: Model) -> Steps:
        steps = Steps([share(batch, 2, 0) for batch in self.batches])
        return Liar(steps.batches[:1]) if rank() == 1 else steps

    fit(Varied(train_dataloader=loader), "2A+1F")


def model_outside_of_a_step() -> None:
    """The model is called in a hook."""
    fit(Varied(on_train_start=lambda self: self.model(tokens(2)["input_ids"])), "2A+1F")


def values_logged_by_one_rank_only() -> None:
    """A1 logs another name."""

    def step(self: Model, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log(f"loss_of_{rank()}", loss)
        return loss

    fit(Varied(training_step=step), "2A+1F")


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


def boom_in_collocated_experts() -> None:
    """In layer 1 on rank 1."""
    module = tiny_module()
    if rank() == 1:
        module.model.layers[1].mlp.experts.act_fn = _boom
    fit(module, "2flowmoe")


def boom_in_a_hook() -> None:
    """The user's own error on A1 while the others go on into the next step."""
    fit(Varied(on_train_batch_start=lambda self, batch, i: _boom() if rank() == 1 and i == 1 else None), "2A+2F")


def boom_at_start() -> None:
    """The user's own error on A1 before the first step."""
    fit(Varied(on_train_start=lambda self: _boom() if rank() == 1 else None), "2A+2F")


def _boom(*args: Any) -> Any:
    raise LookupError("boom")
