"""Router z-loss: equal to the plain loop whose user adds it to the loss of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_job import Batches, LocalJob, micro_batch_loss, plain_step
from tiny import TinyMoE, tiny
from torch import Tensor, nn

from lightning_afd import segments
from lightning_afd.errors import PlanError
from lightning_afd.model.z_loss import add_z_gradient, z_loss
from lightning_afd.placement import Layout

COEFFICIENT = 0.3


def batches(replicas: int) -> Batches:
    """Micro-batches of different sizes; the last one of each replica has no label."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 5), (1, 4), (2, 1)]
    return [[torch.randint(0, 32, shape, generator=generator) for shape in shapes] for _ in range(replicas)]


def loss_with_z(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """What a user would write who knows the routers."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda module, args, out: found.append(out[0]))
        for layer in model.layers  # type: ignore[union-attr]
    ]
    loss = micro_batch_loss(model, ids_BS)
    for hook in hooks:
        hook.remove()
    return loss + COEFFICIENT * sum(z_loss(logits) for logits in found)


def difference(layout: Layout, aux: float, **choices: Any) -> float:
    model, data = tiny(layers=4, aux=aux, shared_expert=True).double(), batches(layout.attention)
    outcome = LocalJob(model, layout, router_z_loss=COEFFICIENT, **choices).step(data)
    return outcome.difference(*plain_step(model, data, loss_with_z))


@pytest.mark.parametrize(
    ("groups", "aux", "recompute"),
    [(1, 0.0, "none"), (1, 0.1, "full"), (2, 0.0, "full"), (2, 0.1, "none"), (2, 0.1, "attention")],
)
def test_it_is_in_loss_and_gradients(groups: int, aux: float, recompute: str) -> None:
    assert difference(Layout(attention=2, ffn=2, groups=groups), aux, recompute=recompute) < 1e-12


def test_a_missing_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "add_z_gradient", lambda leaf, weight: add_z_gradient(leaf, COEFFICIENT))
    assert difference(Layout(attention=1, ffn=1), 0.0) > 1e-3


def test_the_loss_scale_takes_part() -> None:
    leaf = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    add_z_gradient(leaf, 8.0)
    (grad,) = torch.autograd.grad(8.0 * leaf.logsumexp(-1).square().mean(), leaf)
    assert leaf.grad is not None and torch.allclose(leaf.grad, grad, rtol=1e-12)


def test_large_logits_stay_finite_in_half_precision() -> None:
    leaf = torch.full((3, 4), 6e4, dtype=torch.float16, requires_grad=True)
    assert z_loss(leaf).item() == pytest.approx(6e4**2, rel=1e-3)


class OtherRouter(nn.Module):
    """A router that returns something else than its logits."""

    def __init__(self, router: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.router, self.change = router.weight, router.forward, change

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, w_TK, idx_TK = self.router(x_TH)
        return self.change(logits_TE), w_TK, idx_TK


def with_routers(change: Callable[[Tensor], Tensor]) -> TinyMoE:
    model = tiny().double()
    for layer in model.layers:
        layer.mlp.router = OtherRouter(layer.mlp.router, change)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.detach, "MoE layer 2 has no router that returns"),
        (lambda logits_TE: logits_TE.softmax(-1), "the router of MoE layer 2 returns probabilities instead of logits"),
    ],
)
def test_other_routers_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        LocalJob(with_routers(change), Layout(attention=1, ffn=1), router_z_loss=0.1).step(batches(1))


def test_a_negative_coefficient_is_refused() -> None:
    with pytest.raises(PlanError, match=r"router_z_loss=-1\.0: choose 0"):
        LocalJob(tiny(), Layout(attention=1, ffn=1), router_z_loss=-1.0)
