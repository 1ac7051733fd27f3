"""Lightning's precision plugins: the same numbers and the same dtypes as on one device."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import LM, batch, fit_alone, fit_apart, join, largest_difference
from fits import Batch, Model, Run, tiny_module, tokens
from pool import RankPool
from tiny import tiny_hf
from torch import Tensor

TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 5e-2}
MODELS = ("tiny", "qwen3_moe")


@dataclass
class Result:
    """Losses of all steps, and dtypes: of gradients, weights and what user code sees."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: set[torch.dtype]
    seen: set[tuple[torch.dtype, bool]]


class Watched(Model):
    """Remembers losses, and dtypes before and behind the layers, where autocast must be the same."""

    def loss(self, batch: Batch) -> Tensor:
        """The loss of the base class, from watched logits."""
        self.seen.add((torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))
        loss = super().loss(batch)
        hidden = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
        self.seen.add((hidden.dtype, torch.is_autocast_enabled("cpu")))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss of the global batch."""
        self.losses.append(float(outputs["loss"]))


def watched(name: str) -> Watched:
    """A module with 2 batches."""
    module = tiny_module()
    if name != "tiny":
        module = Model(tiny_hf(name), [tokens(8, vocab=64)])
    module.batches = list(module.batches) * 2  # so that the loss falls from step to step
    module.optimizer = partial(torch.optim.SGD, lr=0.3)
    module.__class__ = Watched
    module.seen, module.losses = set(), []  # type: ignore[assignment]
    return module  # type: ignore[return-value]


def fit(run: Run, names: tuple[str, ...] = MODELS) -> list[Result]:
    """Train every model for 2 steps."""
    results = []
    for name in names:
        module = watched(name)
        run.trainer().fit(module)
        weights = {p.dtype for p in module.parameters() if p.device.type != "meta"}
        results.append(Result(module.losses, module.gradients, weights, module.seen))
    return results


@pytest.mark.parametrize("precision", TOLERANCE)
def test_losses_and_dtypes(pool: RankPool, precision: str) -> None:
    run = Run(layout="2A+1F", precision=precision)
    references = pool.run(fit, 1, Run(layout="ref", precision=precision))[0]
    ranks = pool.run(fit, run.world, run)
    for number, reference in enumerate(references):
        results = [rank[number] for rank in ranks]
        gradients = join([result.gradients for result in results])
        for result in results[:2]:
            assert result.losses == pytest.approx(reference.losses, rel=TOLERANCE[precision])
            assert result.seen == reference.seen
        assert all(result.weights == reference.weights for result in results)
        assert {k: g.dtype for k, g in gradients.items()} == {k: g.dtype for k, g in reference.gradients.items()}
        assert gradients.keys() == reference.gradients.keys()
        assert reference.losses[-1] < reference.losses[0]


def test_mixed_precision_is_mixed(pool: RankPool) -> None:
    full = pool.run(fit, 2, Run(layout="1A+1F", precision="32-true"), ("tiny",))[0][0]
    mixed = pool.run(fit, 2, Run(layout="1A+1F", precision="bf16-mixed"), ("tiny",))
    assert abs(mixed[0][0].losses[0] - full.losses[0]) > 1e-4
    assert (torch.bfloat16, True) in mixed[0][0].seen
    assert {gradient.dtype for gradient in mixed[1][0].gradients.values()} == {torch.float32}


def gradients_in_bf16(groups: int) -> dict[str, Tensor]:
    """What one step leaves on this rank; 0 groups: on one device."""
    module = LM([batch(4, 8)])
    if groups:
        fit_apart(module, 1, 1, R=2, p=groups, precision="bf16-true")
    else:
        fit_alone(module, precision="bf16-true")
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_two_groups_in_bf16(pool: RankPool) -> None:
    reference = pool.run(gradients_in_bf16, 1, 0)[0]
    ours = join(pool.run(gradients_in_bf16, 4, 2))
    assert {gradient.dtype for gradient in ours.values()} == {torch.bfloat16}
    assert largest_difference(ours, reference) < TOLERANCE["bf16-true"]
