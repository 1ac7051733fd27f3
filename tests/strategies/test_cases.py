"""Cases D1 to D6: gradients, clip norm, token weights, auxiliary loss, idle F ranks, ragged batches."""

from __future__ import annotations

import math
from typing import Any

import cases
import pytest
import torch
from cases import LM, Steps, batch, fit_alone, fit_apart, join, largest_difference, weights
from pool import RankPool
from torch import Tensor

from lightning_afd.batch import split_batch
from lightning_afd.placement import Layout

LR = 0.1


def one_step(rows: int, layout: Layout, micro_batches: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of one SGD step on this rank: (before - after) / lr."""
    module = LM([batch(rows, 8)], **options).double()
    before = weights(module)
    fit_apart(module, layout.attention, layout.ffn, p=layout.groups, R=micro_batches)
    return {name: _part(before[name], after, layout) / LR for name, after in weights(module).items()}


def _part(before: Tensor, after: Tensor, layout: Layout) -> Tensor:
    """What moved: the rank's own experts of a stacked tensor, or the whole tensor."""
    if before.shape == after.shape:
        return before - after
    start = layout.index_of(torch.distributed.get_rank()) * before.shape[0] // layout.ffn
    return before[start : start + after.shape[0]] - after


D1 = [(1, 1, 1, 4), (2, 2, 1, 4), (1, 2, 1, 4), (3, 1, 1, 6), (1, 1, 2, 4)]


@pytest.mark.parametrize(("attention", "ffn", "groups", "rows"), D1)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_d1_gradients_equal_the_plain_loop(
    pool: RankPool, attention: int, ffn: int, groups: int, rows: int, micro_batches: int
) -> None:
    layout = Layout(attention=attention, ffn=ffn, groups=groups)
    reference = LM([batch(rows, 8)]).double()
    before = weights(reference)
    fit_alone(reference)
    want = {name: (before[name] - after) / LR for name, after in weights(reference).items()}
    got = join(pool.run(one_step, layout.world, rows, layout, micro_batches, {}))
    assert largest_difference(got, want) < 1e-7


class ClipLM(LM):
    """Puts known numbers in place of the gradients before Lightning clips."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_step > 0 or not self.poke:
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        experts = [p for name, p in self.named_parameters() if ".experts." in name and p.device.type != "meta"]
        rank = self.trainer.global_rank
        if rank >= 2:
            experts[0].grad.view(-1)[0] = math.sqrt(20.0) if rank == 2 else 10.0

    poke = True


def clip_step(layout: Layout) -> tuple[float | None, float]:
    """Reported norm and the movement of the first element of the rank's first expert tensor."""
    module = ClipLM([batch(4, 8)]).double()
    before = weights(module)
    trainer = fit_apart(module, layout.attention, layout.ffn, p=layout.groups, gradient_clip_val=1.0)
    experts = [name for name in weights(module) if ".experts." in name]
    moved = [_part(before[name], weights(module)[name], layout).abs().max().item() for name in experts[:1]]
    return trainer.strategy.grad_norm, sum(moved)


def clipped_steps(layout: Layout) -> dict[str, Tensor]:
    module = clipped_module()
    fit_apart(module, layout.attention, layout.ffn, p=layout.groups, gradient_clip_val=1.0)
    return weights(module)


def clipped_module() -> LM:
    module = ClipLM([batch(4, 8, seed) for seed in range(3)]).double()
    module.poke = False
    return module


@pytest.mark.parametrize("layout", [Layout(attention=2, ffn=2), Layout(attention=1, ffn=1, groups=2)])
def test_d2_one_clip_norm_over_split_ownership(pool: RankPool, layout: Layout) -> None:
    results = pool.run(clip_step, 4, layout)
    assert [norm for norm, _ in results] == pytest.approx([math.sqrt(120.0)] * 4, abs=1e-9)
    assert [moved for _, moved in results] == pytest.approx([0.0, 0.0, 0.0408248, 0.0912871], abs=1e-6)
    parts = pool.run(clipped_steps, 4, layout)
    if layout.attention > 1:
        assert parts[0].keys() == parts[1].keys() and all(torch.equal(parts[0][key], parts[1][key]) for key in parts[0])
    reference = clipped_module()
    fit_alone(reference, gradient_clip_val=1.0)
    assert largest_difference(join(parts), weights(reference)) < 1e-7


def masked_batch() -> dict[str, Tensor]:
    data = batch(2, 8)
    data["labels"][0, 2:] = -100
    return data


def masked_step(attention: int, micro_batches: int, groups: int = 1) -> tuple[dict[str, Tensor], float]:
    module = LM([masked_batch()], layers=2).double()
    before = weights(module)
    trainer = fit_apart(module, attention, 1, p=groups, R=micro_batches)
    moved = {name: before[name] - after for name, after in weights(module).items()}
    return moved, trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize(("attention", "micro_batches", "groups"), [(2, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_d3_unequal_valid_tokens(pool: RankPool, attention: int, micro_batches: int, groups: int) -> None:
    reference = LM([masked_batch()], layers=2).double()
    before = weights(reference)
    trainer = fit_alone(reference)
    want = {name: before[name] - after for name, after in weights(reference).items()}
    results = pool.run(masked_step, groups * (attention + 1), attention, micro_batches, groups)
    assert largest_difference(join([moved for moved, _ in results]), want) < 1e-7
    loss = trainer.callback_metrics["train_loss"].item()
    assert [value for _, value in results] == pytest.approx([loss] * len(results), rel=1e-9)


def mean_of_means(attention: int) -> dict[str, Tensor]:
    """The mistake that D3 is about."""
    from lightning_afd.strategies import driver

    right, driver.loss_weight = driver.loss_weight, lambda piece: 1.0
    try:
        return masked_step(attention, 1)[0]
    finally:
        driver.loss_weight = right


def test_d3_mean_of_means_is_caught(pool: RankPool) -> None:
    reference = LM([masked_batch()], layers=2).double()
    before = weights(reference)
    fit_alone(reference)
    want = {name: before[name] - after for name, after in weights(reference).items()}
    assert largest_difference(join(pool.run(mean_of_means, 3, 2)), want) > 1e-3


AUX = {"aux": 0.01, "ce": 0.0}


def aux_step(
    attention: int, micro_batches: int, batches: int, checkpointing: bool, pad: int, groups: int
) -> tuple[dict[str, Tensor], float]:
    """Gate gradients and logged auxiliary loss of 8 rows, given in `batches` accumulated batches."""
    data = padded(batch(8, 8), pad)
    rows = 8 // batches
    items = [{key: value[i * rows : (i + 1) * rows] for key, value in data.items()} for i in range(batches)]
    module = LM(items, checkpointing=checkpointing, **AUX).double()
    before = weights(module)
    trainer = fit_apart(module, attention, 1, p=groups, R=micro_batches, accumulate_grad_batches=batches)
    gates = {name: (before[name] - after) / LR for name, after in weights(module).items() if "gate.weight" in name}
    return gates, trainer.callback_metrics["aux"].item()


def padded(data: dict[str, Tensor], pad: int) -> dict[str, Tensor]:
    """Append `pad` masked tokens to each row."""
    rows = len(data["labels"])
    tail = torch.zeros(rows, pad, dtype=torch.int64)
    mask = torch.cat([torch.ones_like(data["labels"]), tail], 1)
    return {
        "input_ids": torch.cat([data["input_ids"], tail], 1),
        "labels": torch.cat([data["labels"], tail - 100], 1),
        "attention_mask": mask,
    }


def aux_reference(chunks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    module = LM([], **AUX).double()
    _, grads = cases.plain_chunks(module, chunks, lambda chunk: int((chunk["labels"][:, 1:] != -100).sum()))
    return {name: grad for name, grad in grads.items() if "gate.weight" in name}


@pytest.mark.parametrize(
    ("attention", "micro_batches", "batches", "checkpointing", "pad", "groups"),
    [
        (1, 1, 1, False, 0, 1),
        (1, 4, 1, False, 0, 1),
        (2, 2, 1, False, 0, 1),
        (1, 2, 2, False, 0, 1),
        (1, 4, 1, True, 0, 1),
        (1, 4, 1, False, 8, 1),
        (1, 4, 1, False, 0, 2),
    ],
)
def test_d4_auxiliary_loss_is_a_mean_over_the_micro_batches(
    pool: RankPool, attention: int, micro_batches: int, batches: int, checkpointing: bool, pad: int, groups: int
) -> None:
    world = groups * (attention + 1)
    results = pool.run(aux_step, world, attention, micro_batches, batches, checkpointing, pad, groups)
    data = padded(batch(8, 8), pad)
    replicas = [{key: value[a::attention] for key, value in data.items()} for a in range(attention)]
    pieces = micro_batches * batches
    chunks = [piece for replica in replicas for piece in split_batch(replica, pieces)]
    assert largest_difference(join([gates for gates, _ in results]), aux_reference(chunks)) < 1e-7


def test_d4_padding_changes_nothing_and_the_chunks_do(pool: RankPool) -> None:
    plain = aux_reference(split_batch(padded(batch(8, 8), 0), 4))
    with_pad = aux_reference(split_batch(padded(batch(8, 8), 8), 4))
    whole = aux_reference([padded(batch(8, 8), 0)])
    assert largest_difference(with_pad, plain) < 1e-6
    assert largest_difference(whole, plain) > 1e-2


def idle_steps(layout: Layout) -> dict[str, Tensor]:
    """5 AdamW steps in which every token goes to experts 0 and 1; fresh memory is poisoned with NaN."""
    torch.use_deterministic_algorithms(True)
    module = LM([batch(4, 8, seed) for seed in range(5)], opt="adamw", experts=(0, 1), layers=2).double()
    fit_apart(module, layout.attention, layout.ffn, p=layout.groups, R=2)
    return weights(module)


@pytest.mark.parametrize("layout", [Layout(attention=1, ffn=2), Layout(attention=1, ffn=1, groups=2)])
def test_d5_idle_experts(pool: RankPool, layout: Layout) -> None:
    """The second F rank of the first layout has no token at all."""
    reference = LM([batch(4, 8, seed) for seed in range(5)], opt="adamw", experts=(0, 1), layers=2).double()
    before = weights(reference)
    fit_alone(reference)
    got = join(pool.run(idle_steps, layout.world, layout))
    assert all(value.isfinite().all() for value in got.values())
    assert largest_difference(got, weights(reference)) < 1e-7
    for name in (name for name in before if name.endswith("experts.down_proj")):
        ratio = got[name][2:] / before[name][2:]
        assert torch.allclose(ratio, torch.full_like(ratio, 0.999**5), atol=1e-9)


RAGGED = [(4, 5), (4, 9), (3, 3), (1, 7)]


def ragged(replicas: int) -> list[dict[str, Tensor]]:
    return [batch(rows * replicas, length, seed) for seed, (rows, length) in enumerate(RAGGED)]


def ragged_steps(attention: int, groups: int) -> dict[str, Tensor]:
    module = LM(ragged(attention), layers=2).double()
    fit_apart(module, attention, attention, p=groups, R=2)
    return weights(module)


@pytest.mark.parametrize(("attention", "groups"), [(2, 1), (1, 2)])
def test_d6_ragged_batches(pool: RankPool, attention: int, groups: int) -> None:
    reference = LM(ragged(attention), layers=2).double()
    fit_alone(reference)
    got = join(pool.run(ragged_steps, 4, attention, groups))
    assert largest_difference(got, weights(reference)) < 1e-7


def test_steps_resumes_where_it_stopped() -> None:
    loader = Steps([1, 2, 3])
    assert next(iter(loader)) == 1
    again = Steps([1, 2, 3])
    again.load_state_dict(loader.state_dict())
    assert list(again) == [2, 3]
