"""One SGD step of six transformers architectures on separate ranks against a plain loop over the same micro-batches."""

from typing import Any

import pytest
import torch
from cases import join
from fits import Batch, Model, Run, State, chunks, tokens, valid, worst
from pool import RankPool
from tiny import HF, tiny_hf
from torch import Tensor

AUX = {"qwen3_moe": 0.01, "mixtral": 0.02, "olmoe": 0.01, "gpt_oss": 0.02}
LAYOUTS = (("1A+1F", 1), ("2A+2F", 1), ("1A+2F", 1), ("1A+1F", 2))
Outcome = tuple[float, State]


def global_batch() -> Batch:
    """6 rows of 10 tokens, whose micro-batches have unequal numbers of valid labels."""
    return tokens(6, 10, vocab=64)


class OwnLoss(Model):
    """The loss that transformers computes inside the model (in float32, with the auxiliary loss)."""

    def loss(self, batch: Batch) -> Tensor:
        """The model's own loss."""
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def module_of(name: str, kind: type[Model] = Model) -> Model:
    """An unmodified LightningModule around a tiny transformers model, with its auxiliary loss where it has one."""
    aux = AUX.get(name, 0.0)
    return kind(tiny_hf(name, aux=aux), [global_batch()], aux=aux)


def one_step(names: list[str], run: Run, kind: type[Model], checkpointing: bool) -> dict[str, Outcome]:
    """Per architecture: the logged loss and the gradients of what this rank holds."""
    outcomes = {}
    for name in names:
        module = module_of(name, kind)
        if checkpointing:
            module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trainer = run.trainer()
        trainer.fit(module)
        outcomes[name] = float(trainer.callback_metrics["train_loss"]), module.gradients
    return outcomes


def distributed(pool: RankPool, names: list[str], run: Run, *more: Any) -> dict[str, tuple[float, State]]:
    """Per architecture: the loss, equal on all ranks, and every gradient under its global name."""
    ranks = pool.run(one_step, run.world, names, run, *(more or (Model, False)))
    results = {}
    for name in names:
        losses = {rank[name][0] for rank in ranks}
        assert len(losses) == 1, f"{name}: ranks log different losses {losses}"
        results[name] = losses.pop(), join([rank[name][1] for rank in ranks])
    return results


def plain(name: str, run: Run, kind: type[Model] = Model) -> tuple[float, State]:
    """The reference: one process, the same micro-batches one after another, weighted by their valid labels."""
    dtype = torch.float64 if run.precision == "64-true" else torch.float32
    module = module_of(name, kind).to(dtype)
    total, loss = valid(global_batch()), 0.0
    for chunk in chunks(global_batch(), run):
        value = module.loss(chunk) * valid(chunk) / total
        value.backward()
        loss += value.item()
    return loss, {key: p.grad for key, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("layout", "groups"), LAYOUTS)
def test_loss_and_every_gradient_equal_the_plain_loop(pool: RankPool, layout: str, groups: int) -> None:
    run = Run(layout=layout, groups=groups, precision="64-true")
    for name, (loss, grads) in distributed(pool, list(HF), run).items():
        loss_ref, grads_ref = plain(name, run)
        assert loss == pytest.approx(loss_ref, rel=1e-9), name
        ratio, parameter = worst(grads, grads_ref)
        assert ratio <= 1e-7, f"{name}: {parameter} is off by {ratio:.2e}"


def test_the_loss_of_transformers_itself(pool: RankPool) -> None:
    run = Run(layout="2A+2F")
    for name, (loss, grads) in distributed(pool, list(HF), run, OwnLoss, False).items():
        loss_ref, grads_ref = plain(name, run, OwnLoss)
        assert loss == pytest.approx(loss_ref, rel=1e-5), name
        assert worst(grads, grads_ref)[0] <= 1e-5, name


def test_gradient_checkpointing(pool: RankPool) -> None:
    run = Run(layout="1A+2F", precision="64-true")
    for name, (loss, grads) in distributed(pool, list(HF), run, Model, True).items():
        loss_ref, grads_ref = plain(name, run)
        assert loss == pytest.approx(loss_ref, rel=1e-9), name
        assert worst(grads, grads_ref)[0] <= 1e-7, name


def test_a_changed_weight_of_the_auxiliary_loss_is_noticed(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(layout="1A+1F", precision="64-true")
    _, grads = distributed(pool, ["qwen3_moe"], run)["qwen3_moe"]
    monkeypatch.setitem(AUX, "qwen3_moe", 0.011)
    ratio, parameter = worst(grads, plain("qwen3_moe", run)[1])
    assert ratio > 1e-5 and "gate" in parameter
