"""The plain-torch model of the suite does what the splitting of a model relies on."""

from typing import Any

import torch
from tiny import TinyMoE, TinyRouter, tiny
from torch import Tensor, nn


def ids(seed: int = 0) -> Tensor:
    """Two rows of five tokens."""
    return torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(seed))


def replace_logits(model: TinyMoE) -> list[Tensor]:
    """Let each router return a leaf in place of its logits; the leaves come to the list."""
    leaves: list[Tensor] = []

    def hook(_router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves.append(output[0].detach().requires_grad_())
        return (leaves[-1], *output[1:])

    for router in (module for module in model.modules() if isinstance(module, TinyRouter)):
        router.register_forward_hook(hook)
    return leaves


def test_router_logits_are_what_hooks_made_before_the_first_forward_leave() -> None:
    model = tiny(aux=0.01, dense_first=1).double()
    leaves = replace_logits(model)
    output = model(ids())
    assert len(leaves) == 2
    assert all(logits is leaf for logits, leaf in zip(output.router_logits, leaves, strict=True))
    output.aux_loss.backward()
    assert all(leaf.grad.abs().sum() > 0 for leaf in leaves)


def test_router_logits_ignore_hooks_made_after_it() -> None:
    model = tiny()
    model(ids())
    leaves = replace_logits(model)
    assert not any(a is b for a, b in zip(model(ids()).router_logits, leaves, strict=True))


def test_layers_add_the_experts_output() -> None:
    layer = tiny(shared_expert=True).double().layers[1]
    h = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        whole, experts = layer(h), layer.mlp.experts
        y = experts(*captured(layer, h)).view_as(h)
        experts.down_proj.zero_()
        torch.testing.assert_close(whole - layer(h), y)
    assert y.abs().max() > 1e-3


def captured(layer: nn.Module, h: Tensor) -> tuple[Tensor, ...]:
    """The arguments that a layer calls its experts with."""
    calls: list[tuple[Tensor, ...]] = []
    hook = layer.mlp.experts.register_forward_pre_hook(lambda _module, args: calls.append(args))
    layer(h)
    hook.remove()
    return calls[0]


def test_options() -> None:
    model = tiny(tied=True, dense_first=2, layers=3)
    assert model.lm_head.weight is model.embedding.weight
    assert len(model(ids()).router_logits) == 1
    assert torch.equal(tiny(1)(ids()).logits, tiny(1)(ids()).logits)
    assert not torch.equal(tiny(1)(ids()).logits, tiny(2)(ids()).logits)
    assert not torch.equal(*(tiny(dropout=0.5)(ids()).logits for _ in range(2)))
