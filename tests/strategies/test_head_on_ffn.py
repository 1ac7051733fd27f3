"""Whole runs with head="ffn" against one device: weights, clip norm, metrics, outputs, predictions, resume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from cases import LM, Steps, batch, fit_alone, fit_apart, join, largest_difference, weights
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pool import RankPool
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_afd import AFDStrategy

TOLERANCE = 1e-7


class Everything(LM):
    """Validates, predicts, returns more than its loss, and has learned parts and a metric of its own."""

    def __init__(self, steps: list[dict[str, Tensor]], aux: float = 0.0) -> None:
        super().__init__(steps, aux=aux)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mean, self.outputs = MeanMetric(), list[dict[str, Tensor]]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * self.scale
        self.log("most", batch["input_ids"].max().float(), reduce_fx="max")
        return {"loss": loss, "rows": batch["input_ids"][:, 0], "scale": self.scale.detach().clone()}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        out = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
        self.log("val_loss", out.loss, batch_size=len(batch["labels"]))
        self.mean.update(out.logits.double().square().mean(), weight=len(batch["labels"]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_square", self.mean.compute())
        self.mean.reset()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits

    def val_dataloader(self) -> Steps:
        unmasked = LM([batch(6, 8, 9)])
        unmasked.trainer = self.trainer
        return unmasked.train_dataloader()


@dataclass
class Result:
    """What one rank has at the end of a run."""

    weights: dict[str, Tensor]
    metrics: dict[str, float]
    outputs: list[dict[str, Tensor]]
    predictions: list[Tensor]
    norm: float | None


def steps() -> list[dict[str, Tensor]]:
    """Batches of 6 rows, one of which has unequal numbers of masked labels."""
    found = [batch(6, 8, seed) for seed in range(3)]
    found[1]["labels"][:3, 4:] = -100
    return found


OPTIONS: dict[str, Any] = {"gradient_clip_val": 0.2, "num_sanity_val_steps": 0}


def result_of(module: Everything, trainer: pl.Trainer) -> Result:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    norm, outputs, held = getattr(trainer.strategy, "grad_norm", None), module.outputs, weights(module)
    loader = Steps(module.train_dataloader().items[:1])
    predictions = trainer.predict(module, loader) or []
    return Result(held, metrics, outputs, [p for p in predictions if p is not None], norm)


def fit(attention: int, ffn: int, groups: int, micro_batches: int, aux: float) -> Result:
    module = Everything(steps(), aux).double()
    return result_of(module, fit_apart(module, attention, ffn, p=groups, R=micro_batches, head="ffn", **OPTIONS))


@pytest.mark.parametrize(
    ("attention", "ffn", "groups", "micro_batches", "aux"),
    [(2, 2, 1, 2, 0.0), (3, 1, 1, 1, 0.0), (1, 3, 1, 1, 0.05), (1, 1, 2, 1, 0.05)],
)
def test_run(pool: RankPool, attention: int, ffn: int, groups: int, micro_batches: int, aux: float) -> None:
    reference = Everything(steps(), aux).double()
    before = weights(reference)
    want = result_of(reference, fit_alone(reference, **OPTIONS))
    world = groups * (attention + ffn)
    got: list[Result] = pool.run(fit, world, attention, ffn, groups, micro_batches, aux)
    whole = join([rank.weights for rank in got])
    moved = {name: before[name] - value for name, value in whole.items()}
    assert largest_difference(moved, {name: before[name] - value for name, value in want.weights.items()}) < TOLERANCE
    for rank in got:
        assert rank.metrics == pytest.approx(want.metrics, rel=1e-6)  # transformers computes the loss in float32
        assert rank.norm == got[0].norm is not None
    for step, expected in enumerate(want.outputs):
        rows = torch.stack([rank.outputs[step]["rows"] for rank in got[:attention]], 1)
        assert torch.equal(rows.flatten(), expected["rows"])
        losses = [rank.outputs[step]["loss"].item() for rank in got[:attention]]
        assert losses == pytest.approx([expected["loss"].item()] * attention, rel=TOLERANCE)
        assert got[0].outputs[step]["scale"].item() == pytest.approx(expected["scale"].item())
    for rank in got:  # batch 0 of all replicas, which divide rows in turn
        predicted = torch.stack(list(rank.predictions[:attention]), 1).flatten(0, 1)
        assert torch.allclose(predicted, want.predictions[0], atol=1e-9)


def moved_in_bf16(head: str, meta: bool) -> dict[str, Tensor]:
    """What two steps with everything that makes a step less plain leave on this rank."""
    L.seed_everything(3)
    module = Lazy(steps()) if meta else LM(steps(), aux=0.05)
    options = {"recompute": "full", "recompute_experts": True, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    fit_apart(module, 2, 1, R=2, head=head, **options)
    return weights(module)


class Lazy(LM):
    """Made on the meta device."""

    def __init__(self, steps: list[dict[str, Tensor]]) -> None:
        with torch.device("meta"):
            super().__init__(steps)


@pytest.mark.parametrize("meta", [False, True])
def test_both_places_of_the_head_give_the_same_bits(pool: RankPool, meta: bool) -> None:
    """With autocast, recompute, accumulation with a short last window; parameters of a model made on the meta device
    start alike, too.
    """
    want, got = (join(pool.run(moved_in_bf16, 3, head, meta)) for head in ("attention", "ffn"))
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_run_sees_tails_that_are_not_summed(pool: RankPool) -> None:
    assert pool.run(fit_without_sums, 4) == [False, False, True, True]


def fit_without_sums() -> bool:
    """Whether this rank has a head, which then differs from the one of the other rank."""
    from lightning_afd import reduction

    right, reduction.sum_over_replicas = reduction.sum_over_replicas, lambda *args: None
    try:
        module = LM(steps()).double()
        trainer = fit_apart(module, 2, 2, R=2, head="ffn")
        head = weights(module).get("model.lm_head.weight")
        everyone = [None] * 4
        torch.distributed.all_gather_object(everyone, None if head is None else head.sum().item())
        del trainer
        return head is not None and everyone[2] != everyone[3]
    finally:
        reduction.sum_over_replicas = right


class Saving(pl.Callback):
    """Saves after the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def resumed(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after a whole run and after one that goes on in its middle."""
    whole, again = (LM(steps(), opt="adamw").double() for _ in range(2))
    fit_apart(whole, 2, 1, head="ffn", callbacks=[Saving(path)], **OPTIONS)
    fit_apart(again, 2, 1, head="ffn", ckpt_path=path, **OPTIONS)
    return weights(whole), weights(again)


def test_resume_is_exact(pool: RankPool, tmp_path: Path) -> None:
    for whole, again in pool.run(resumed, 3, tmp_path / "saved"):
        assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_unknown_head_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="head='F': choose 'attention' or 'ffn'"):
        AFDStrategy(head="F")
