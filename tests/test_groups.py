"""Several groups per role: where parameters live, and random numbers that do not depend on the number of groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from local_job import Batches, Gradients, LocalJob, make_batches, micro_batch_loss, plain_step
from tiny import TinyBlock, TinyMoE, tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd.model.coroutine import Coroutine
from lightning_afd.model.place import is_owned
from lightning_afd.model.port import Foreign
from lightning_afd.placement import Layout
from lightning_afd.segments import UserStep

TWO_GROUPS = Layout(attention=1, ffn=1, groups=2)


@pytest.mark.parametrize(
    "model",
    [
        tiny(layers=5, dense_first=1, dense=(3,)),
        tiny(layers=3, tied=True),
        tiny(layers=1),  # nothing is left for the second group
        tiny_hf("qwen3_moe"),
        tiny_hf("deepseek_v3"),
    ],
    ids=["dense", "tied", "one-layer", "qwen3_moe", "deepseek_v3"],
)
def test_each_parameter_lives_in_one_group(model: nn.Module) -> None:
    """Group 1 keeps no memory of embedding and head, of neither layers nor experts of group 0."""
    job = LocalJob(model, TWO_GROUPS)
    kept = [{name for name, p in own.named_parameters() if is_owned(p)} for own in job.models]
    assert sum(map(len, kept)) == len(set().union(*kept)) == len(dict(model.named_parameters()))
    other = dict(job.models[1].named_parameters())
    stored = {name for name, p in other.items() if p.device.type != "meta"}
    assert not any("embed" in name or "lm_head" in name or ".experts." in name for name in stored)
    copies = {name for name in stored if not is_owned(other[name])}
    assert sum(other[name].numel() for name in copies) <= 2 * 32  # the final norm, which group 1 never runs
    assert stored - copies == kept[1]
    assert bool(kept[1]) == (job.engines[0].plan.layers > 1)


def random_loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """A step that draws random numbers before the model, too: it leaves out the end of its rows."""
    return micro_batch_loss(model, ids_BS[:, : int(torch.randint(2, ids_BS.shape[1] + 1, ()))])


def seed_of(ids_BS: Tensor) -> int:
    """A seed for each micro-batch."""
    return 1000 * int(ids_BS.sum())


class SeededJob(LocalJob):
    """Its micro-batches have random numbers of their own."""

    def _user_step(self, rank: int, ids_BS: Tensor, weight: float) -> UserStep:
        return replace(super()._user_step(rank, ids_BS, weight), seed=seed_of(ids_BS))


def seeded_plain_step(batches: Batches) -> tuple[float, Gradients]:
    """The plain loop, whose random numbers start anew with each micro-batch and behind each of its MoE layers."""
    model, seed = model_with_dropout(), 0
    routed = [layer for layer in model.layers if isinstance(layer.mlp, TinyBlock)]
    for index, layer in enumerate(routed):
        layer.register_forward_hook(lambda *_, index=index: torch.manual_seed(seed + index + 1) and None)

    def loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
        nonlocal seed
        seed = seed_of(ids_BS)
        torch.manual_seed(seed)
        return random_loss(model, ids_BS)

    return plain_step(model, batches, loss)


def model_with_dropout() -> TinyMoE:
    return tiny(layers=5, dense_first=1, dense=(3,), dropout=0.3, aux=0.1, hidden=8).double()


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_random_numbers_do_not_depend_on_the_number_of_groups(groups: int, recompute: str) -> None:
    """Nor on what was drawn before the step, by the order of micro-batches, or in other layers."""
    batches = make_batches(2, 3)
    job = SeededJob(
        model_with_dropout(), Layout(attention=2, ffn=1, groups=groups), loss=random_loss, recompute=recompute
    )
    want = seeded_plain_step(batches)
    for _ in range(2):  # the first step probes the layers, the second doesn't
        assert job.step(batches).difference(*want) < 1e-12


def test_other_random_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(2, 3)
    want = seeded_plain_step(batches)
    monkeypatch.setattr(Coroutine, "reseed", lambda *args: None)
    job = SeededJob(model_with_dropout(), Layout(attention=2, ffn=1, groups=2), loss=random_loss)
    assert job.step(batches).difference(*want) > 1e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_auxiliary_loss_of_transformers_sees_the_layers_of_all_groups(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, batches = tiny_hf(name, aux=0.1).double(), make_batches(1, 2)
    want = plain_step(model, batches)
    assert LocalJob(model, TWO_GROUPS).step(batches).difference(*want) < 1e-12
    monkeypatch.setattr(Foreign, "_stand_in", lambda *args: None)
    left_out = LocalJob(model, TWO_GROUPS).step(batches)
    assert abs(left_out.loss - want[0]) > 1e-4 and left_out.difference(*want) > 1e-3
