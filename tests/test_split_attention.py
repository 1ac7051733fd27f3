"""Attention backward in two parts, inputs first: the same gradients, and what is sent never waits for weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, plain_step
from tiny import TinyLayer, TinyMoE, tiny, tiny_hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_afd.attention_rank import AttentionRank
from lightning_afd.model.input_first import Indivisible, WeightGradients, input_gradients
from lightning_afd.model.port import suspended_layers
from lightning_afd.placement import Layout
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS, Knobs

TOLERANCE = 1e-12
EVERYTHING: dict[str, Any] = {"aux": 0.05, "shared_expert": True, "dense_first": 1, "layers": 5}


def model_of(**sizes: Any) -> TinyMoE:
    return tiny(**{"layers": 3, "hidden": 8, "expert_width": 4, **sizes}).double()


def difference(model: nn.Module, layout: Layout, order: str = "zero-bubble", **choices: Any) -> float:
    """How far one step with split attention is from the plain loop."""
    batches = make_batches(layout.attention, 5)
    job = LocalJob(model, layout, order, split_attention=True, **choices)
    return job.step(batches).difference(*plain_step(model, batches))


@pytest.mark.parametrize(
    ("groups", "head", "order"),
    [
        *((groups, head, "zero-bubble") for groups in (1, 2, 4) for head in ("attention", "ffn")),
        *((2, "attention", order) for order in ORDERS if order != "zero-bubble"),
    ],
)
def test_step_equals_the_plain_loop(groups: int, order: str, head: Any) -> None:
    layout = Layout(attention=2, ffn=2, groups=groups, head=head)
    assert difference(model_of(**EVERYTHING), layout, order) < TOLERANCE


@pytest.mark.parametrize(
    "sizes",
    [{"tied": True}, {"dense_first": 2, "layers": 4}, {"shared_expert": True}, {"layers": 1}],
    ids=["tied", "dense", "shared-expert", "one-layer"],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_models_equal_the_plain_loop(sizes: dict[str, Any], groups: int) -> None:
    assert difference(model_of(aux=0.1, **sizes), Layout(attention=1, ffn=2, groups=groups)) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("groups", [1, 2])
def test_models_of_transformers_equal_the_plain_loop(name: str, groups: int) -> None:
    aux = {} if name == "deepseek_v3" else {"aux": 0.1}
    assert difference(tiny_hf(name, **aux).double(), Layout(attention=1, ffn=2, groups=groups)) < TOLERANCE


class ScaledLayer(TinyLayer):
    """Not additive: what the experts return passes through a tanh."""

    def forward(self, h_BSH: Tensor) -> Tensor:
        return super().forward(h_BSH).tanh()


def test_layers_that_wait_at_their_experts_equal_the_plain_loop() -> None:
    model, batches = model_of(aux=0.1), make_batches(1, 3)
    for layer in model.layers:
        layer.__class__ = ScaledLayer
    job = LocalJob(model, Layout(attention=1, ffn=1), "zero-bubble", split_attention=True)
    want = plain_step(model, batches)
    for _ in range(2):  # in the first step it is not known yet which layers have to wait
        assert job.step(batches).difference(*want) < TOLERANCE
    assert len(suspended_layers(job.models[0])) == 3


@pytest.mark.parametrize("recompute", ["attention", "full"])
def test_recomputed_segments_are_not_divided_and_say_so_once(recompute: str) -> None:
    model, batches = model_of(**EVERYTHING), make_batches(1, 4)
    want = plain_step(model, batches)
    job = LocalJob(model, Layout(attention=1, ffn=1), "zero-bubble", split_attention=True, recompute=recompute)
    with pytest.warns(UserWarning, match="computes its forward again in backward") as warned:
        for _ in range(2):
            assert job.step(batches).difference(*want) < TOLERANCE
    assert len(warned) == 1


def test_comparison_sees_weight_gradients_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightGradients, "run", lambda self: None)
    assert difference(model_of(), Layout(attention=1, ffn=1)) > 0.1


def test_what_is_sent_does_not_wait_for_weights() -> None:
    """When the weight gradients of a segment are made, all that its input gradients are sent in has left."""
    job = LocalJob(model_of(), Layout(attention=1, ffn=1, groups=2), "sequential", split_attention=True)
    job.step(make_batches(1, 2))
    shape = job.engines[0].plan.shape(2)
    for segment in (1, 2, 3):
        input_gradient, weights = Action("A", segment, "b", 1), Action("A", segment, "w", 1)
        engine = job.engines[shape.owner(weights).group]
        done = [span.action for span in engine.runtime.spans]
        sends = [a for a in done if a.is_transfer and input_gradient in shape.dependencies(a)]
        assert len(sends) >= 2  # a gradient for the experts, a hop of the other
        assert done.index(input_gradient) < min(map(done.index, sends))
        assert max(map(done.index, sends)) < done.index(weights)


@pytest.mark.parametrize("pending", [1, 2])
def test_no_more_is_put_off_than_asked_for(pending: int) -> None:
    knobs = Knobs(pending=pending)
    job = LocalJob(model_of(), Layout(attention=1, ffn=1, groups=2), "zero-bubble", split_attention=True, knobs=knobs)
    held: list[int] = []
    for engine in job.engines[:2]:
        rank = engine.attention
        assert isinstance(rank, AttentionRank)
        backward = rank._attention_backward

        def counting(action: Action, rank: AttentionRank = rank, backward: Any = backward) -> None:
            backward(action)
            held.append(sum(len(flight.put_off) for flight in rank._flight))

        engine.runtime._tables = {engine.worker: {**engine.runtime._tables[engine.worker], ("A", "b"): counting}}
    job.step(make_batches(1, 6))
    assert max(held) == pending and not any(flight.put_off for flight in job.engines[1].attention._flight)  # type: ignore[union-attr]


class Square(torch.autograd.Function):
    """x * w * w, by a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w * w, (grads[0] * 2 * x * w).sum(0)


class Parts(nn.Module):
    """What a segment may be made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.scale, self.beside = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(3, 4))


def plain(parts: Parts, x: Tensor) -> Tensor:
    return parts.two(parts.scale * torch.tanh(parts.one(x)))


def with_a_branch(parts: Parts, x: Tensor) -> Tensor:
    """A parameter that no input leads past; it is an output of its own."""
    return torch.cat([plain(parts, x), parts.beside.sin()])


def used_side_by_side(parts: Parts, x: Tensor) -> Tensor:
    return parts.one(x) * parts.one(x.cos())


def cast_once(parts: Parts, x: Tensor) -> Tensor:
    """Autocast keeps the cast weight for the second use."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return parts.one(x).float() * parts.one(x.cos()).float()


def with_a_hook(parts: Parts, x: Tensor) -> Tensor:
    y = parts.one(x)
    y.register_hook(lambda grad: 3 * grad)
    return parts.two(y)


def of_no_parameter(parts: Parts, x: Tensor) -> Tensor:
    return x


DIVISIBLE = [plain, with_a_branch, used_side_by_side, cast_once, with_a_hook, of_no_parameter]


def gradients(parts: Parts, x: Tensor) -> dict[str, Tensor]:
    named = [("x", x), *parts.named_parameters()]
    return {name: tensor.grad.clone() for name, tensor in named if tensor.grad is not None}


@pytest.mark.parametrize("function", DIVISIBLE)
def test_two_parts_are_one_backward(function: Any) -> None:
    parts, x = Parts(), torch.rand(3, 4).requires_grad_()
    function(parts, x).square().sum().backward()
    want = gradients(parts, x)
    parts.zero_grad()
    x.grad = None
    counted: list[str] = []
    parts.one.weight.register_post_accumulate_grad_hook(lambda _: counted.append("weight"))
    out = function(parts, x)
    later = input_gradients([(out, 2 * out.detach())])
    assert gradients(parts, x).keys() == {"x"} and torch.equal(gradients(parts, x)["x"], want["x"])
    later.run()
    torch.testing.assert_close(gradients(parts, x), want, rtol=0, atol=0)
    assert len(counted) == ("one.weight" in want)


def used_twice(parts: Parts, x: Tensor) -> Tensor:
    return parts.one(parts.two(parts.one(x)))


def with_an_operation_of_its_own(parts: Parts, x: Tensor) -> Tensor:
    return Square.apply(x, parts.scale)  # type: ignore[no-untyped-call]


class CompiledFunction(Square):
    """Named as what torch.compile makes; it may be run once only and cannot keep its graph."""


def with_a_compiled_part(parts: Parts, x: Tensor) -> Tensor:
    return CompiledFunction.apply(x, torch.ones(4))  # type: ignore[no-any-return, no-untyped-call]


INDIVISIBLE = {
    with_a_compiled_part: "compiled part",
    used_twice: "twice, one use behind the other",
    with_an_operation_of_its_own: "operation of its own .SquareBackward.",
}


@pytest.mark.parametrize("function", INDIVISIBLE)
def test_what_cannot_be_divided_is_left_alone(function: Any) -> None:
    parts, x = Parts(), torch.rand(3, 4).requires_grad_()
    out = function(parts, x)
    with pytest.raises(Indivisible, match=INDIVISIBLE[function]):
        input_gradients([(out, torch.ones_like(out))])
    assert not gradients(parts, x)
    out.sum().backward()  # nothing was freed either


def used_beside_too(parts: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    return parts.scale * x, parts.scale.sin()


def test_a_parameter_beside_and_behind_the_input_is_not_divided() -> None:
    x = torch.rand(3, 4).requires_grad_()
    with pytest.raises(Indivisible, match="both beside and behind"):
        input_gradients([(out, torch.ones_like(out)) for out in used_beside_too(Parts(), x)])


def test_nothing_is_computed_twice() -> None:
    """Both parts together run the matrix products of one backward, the first one only those towards inputs."""
    parts, x = Parts(), torch.rand(3, 4).requires_grad_()
    out = plain(parts, x)
    with Products() as first:
        later = input_gradients([(out, torch.ones_like(out))])
    with Products() as second:
        later.run()
    assert (first.count, second.count) == (2, 2)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))
