"""Bytes per rank, against what a real split of a small model holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_job import LocalJob, make_batches
from tiny import HF, hf_config, tiny_hf
from torch import Tensor, nn

from lightning_afd.cost.config import model_shape
from lightning_afd.cost.in_flight import peak, pipelined
from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices, Job
from lightning_afd.cost.memory import bounded_activations, memory_of, scheduled_activations, segment_bytes
from lightning_afd.cost.model import SegmentShape
from lightning_afd.cost.times import step_costs
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.place import owned_bytes, owned_parameters
from lightning_afd.placement import Layout, Worker
from lightning_afd.recipes.shapes import named_cluster
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.check import in_flight
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.schedule.shape import Shape

CLUSTER = replace(named_cluster("local"), devices_per_node=16, nics_per_node=16)
FULL = Choices(precision=PRECISIONS["32"])
ROWS, LENGTH = 2, 16


def job_of(config: Any, layout: Layout, choices: Choices = FULL, micro_batches: int = 4) -> Job:
    return Job(
        model=model_shape(config.to_dict()),
        layout=layout,
        cluster=CLUSTER,
        batch=BatchShape.rows(ROWS, LENGTH),
        micro_batches=micro_batches,
        choices=choices,
    )


SPLITS = [
    ("qwen3_moe", {"tie_word_embeddings": True}, Layout(attention=2, ffn=3, groups=2), "attention"),
    ("gpt_oss", {}, Layout(attention=1, ffn=2), "attention"),
    ("deepseek_v3", {}, Layout(attention=1, ffn=2, groups=2), "attention"),
    ("deepseek_v3", {}, Layout(attention=2, ffn=2), "ffn"),
]


@pytest.mark.parametrize(("name", "settings", "layout", "place"), SPLITS)
def test_memory_of_every_rank(name: str, settings: dict[str, Any], layout: Layout, place: Any) -> None:
    model = tiny_hf(name, **settings)
    split = LocalJob(model, layout, shared_experts=place)
    split.step(make_batches(layout.attention, 2))
    job = job_of(model.config, layout, replace(FULL, shared_experts=place))
    for rank, own in enumerate(split.models):
        worker = layout.worker_of(rank)
        counted = memory_of(job, worker, activations=0.0)
        trained = [parameter for _, parameter in owned_parameters(own)]
        optimizer = torch.optim.AdamW(trained)
        optimizer.step()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        real = (owned_bytes(own), nbytes(p.grad for p in trained), nbytes(moments))
        if worker.role == "A" or layout.index_of(rank) == 0:
            assert real == (counted.weights, counted.gradients, counted.optimizer)
        else:  # the first one has most experts
            assert all(mine <= first for mine, first in zip(real, (counted.weights, counted.gradients), strict=False))


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind some tensors, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def saved_by(layer: nn.Module, run: Callable[[], Any], parameters: set[int]) -> int:
    """Bytes that autograd keeps of a decoder layer in a forward, with its input and output; its experts add nothing."""
    kept: list[Tensor] = []
    forward = layer.forward

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def watched(h: Tensor, *args: Any, **kwargs: Any) -> Any:
        leaf = h.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(leaf, *args, **kwargs)
        kept.extend([leaf, out])
        return out

    layer.forward = watched  # type: ignore[method-assign]
    run()
    return storage_bytes(tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in parameters)


WIDE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 128, "head_dim": 32},
    "deepseek_v3": {
        **{"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "q_lora_rank": 64},
        **{"kv_lora_rank": 32, "qk_nope_head_dim": 24, "v_head_dim": 32},
    },
}


@pytest.mark.parametrize("precision", ["32", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", WIDE)
def test_activations_of_attention_ranks(name: str, precision: str) -> None:
    """With the attention kernel that keeps no scores, as on a GPU."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    model = tiny_hf(name, **{**HF[name], **WIDE[name]}).to(dtype)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    job = job_of(model.config, Layout(attention=1, ffn=1), Choices(precision=PRECISIONS[precision]))
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 7
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for layer in layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = lambda x, idx, w: torch.zeros_like(x)
    for index, layer in enumerate(layers[:2]):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            real = saved_by(layer, lambda: model(ids), parameters)
        segment = SegmentShape(layers=(job.model.layers[index],), embeds=False)
        assert segment_bytes(job, segment) == pytest.approx(real, rel=0.12)


def test_recompute_keeps_less() -> None:
    config = hf_config("deepseek_v3")
    none, attention, full = (
        [segment_bytes(job, segment) for segment in job.model.segments]
        for job in (
            job_of(config, Layout(attention=1, ffn=1), replace(FULL, recompute=choice))  # type: ignore[arg-type]
            for choice in ("none", "attention", "full")
        )
    )
    assert all(a > b > c for a, b, c in zip(none[:-1], attention[:-1], full[:-1], strict=True))
    assert none[-1] == full[-1]  # loss and head are not computed again


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_of_ffn_ranks(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    """What the experts keep after forward and after the input gradient."""
    config, layout = hf_config("qwen3_moe"), Layout(attention=1, ffn=1)
    real: list[int] = []
    forward, backward = ExpertShard.forward, ExpertShard.backward

    def watching_forward(self: ExpertShard, *args: Any, **kwargs: Any) -> Any:
        y_TH, saved = forward(self, *args, **kwargs)
        real.append(payload_bytes(saved))
        return y_TH, saved

    def watching_backward(self: ExpertShard, *args: Any) -> Any:
        dx_TH, dw_TK, pending = backward(self, *args)
        real.append(payload_bytes(pending))
        return dx_TH, dw_TK, pending

    monkeypatch.setattr(ExpertShard, "forward", watching_forward)
    monkeypatch.setattr(ExpertShard, "backward", watching_backward)
    split = LocalJob(tiny_hf("qwen3_moe"), layout, "sequential", recompute_experts=recompute)
    split.step([[torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 7]])
    job = job_of(config, layout, replace(FULL, recompute_experts=recompute))
    first = [Action.parse("E0f0")]
    kept = scheduled_activations(job, Worker("F", 0), first)
    both = scheduled_activations(job, Worker("F", 0), [Action.parse("E0f0"), Action.parse("E0b0")])
    assert kept == pytest.approx(real[0], rel=0.05)
    assert both == pytest.approx(real[-1], rel=0.05)


def payload_bytes(once: Any) -> int:
    payload = once._payload
    tensors = [getattr(payload, field) for field in payload.__slots__]
    rows = [getattr(payload.rows, field) for field in vars(payload.rows)] if hasattr(payload.rows, "__dict__") else []
    rows = rows or [getattr(payload.rows, field) for field in payload.rows.__slots__]
    return storage_bytes(tensor for tensor in (*tensors, *rows) if isinstance(tensor, Tensor))


SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(SHAPES)
def test_pipelined_bounds_what_a_schedule_holds(numbers: tuple[int, int, int]) -> None:
    layers, groups, runs = numbers
    shape = Shape(layers=layers, groups=groups, micro_batches=4 * groups * runs)
    schedule = build("af-pipe", shape)
    for worker in shape.workers():
        place = 2 * worker.group + (worker.role == "F")
        bound = pipelined(shape, place, 4 * groups) + (worker == Worker("A", 0))  # the tail
        assert in_flight(schedule, worker) <= bound
        if layers % groups == 0 and runs > 1:
            assert in_flight(schedule, worker) == bound


@pytest.mark.parametrize("order", sorted(ORDERS.keys() - {"zero-bubble"}))
def test_bytes_of_a_schedule(order: str) -> None:
    """The bound leaves out what zero-bubble keeps for weight gradients that it has put off."""
    config, layout = hf_config("qwen3_moe", num_hidden_layers=4), Layout(attention=1, ffn=2, groups=2)
    job = job_of(config, layout, micro_batches=16)
    schedule = build(order, job.shape)
    for worker in job.shape.workers():
        exact = scheduled_activations(job, worker, schedule.programs[worker])
        held = in_flight(schedule, worker)
        assert 0 < exact <= bounded_activations(job, worker, held)
        assert bounded_activations(job, worker, held) < 2.5 * exact
        rest = memory_of(job, worker, 0.0).total
        assert memory_of(job, worker, exact).total == pytest.approx(rest + exact)


def test_peak_of_a_program() -> None:
    program = [Action.parse(name) for name in ("A0f0", "A0f1", "A0b1", "A0f2", "A0b2", "A0b0")]
    assert peak(program, lambda action: 3.0 if action.phase == "f" else -3.0) == 6.0


@pytest.mark.parametrize("shared", ["attention", "ffn"])
def test_bytes_on_the_wire(shared: Any) -> None:
    """With as many F ranks as experts each token travels K times, wherever it goes: the sums are known exactly."""
    layout = Layout(attention=2, ffn=4, groups=2)
    model = tiny_hf("deepseek_v3")
    split = LocalJob(model, layout, shared_experts=shared, micro_batches=2)
    batches = [[torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 7 + m for m in range(2)] for _ in range(2)]
    split.step(batches)
    job = job_of(model.config, layout, replace(FULL, shared_experts=shared), micro_batches=2)
    costs = step_costs(job)
    for role, ranks in (("A", layout.attention), ("F", layout.ffn)):
        sent = sum(
            cost.sent_bytes
            for (op, layer, phase), cost in costs.actions.items()
            if op in "DCH" and costs.shape.endpoints(Action(op, layer, phase, 0))[0].role == role
        )
        real = sum(e.link.payload_bytes for r, e in enumerate(split.engines) if layout.worker_of(r).role == role)
        assert real == pytest.approx(sent * ranks * job.micro_batches, rel=0.03)
