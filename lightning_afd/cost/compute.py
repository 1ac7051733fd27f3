"""Seconds of the computations of one micro-batch, on the busiest rank.

Per attention segment (T tokens of one A rank), with roofline GEMMs: forward = matrices + core / (peak x its efficiency)
+ elementwise; input gradient = matrices + 2.5 core (flash attention computes the scores again: five products instead of
two, 2205.14135) + 1.5 elementwise; weight gradient = matrices. Experts likewise, without a core.
"""

from __future__ import annotations

from lightning_afd.cost.job import Job
from lightning_afd.cost.model import ExpertsShape, LayerShape, SegmentShape, mean_keys
from lightning_afd.cost.traffic import load_of
from lightning_afd.schedule.actions import Phase

CORE_BACKWARD = 2.5
ELEMENTWISE_BACKWARD = 1.5


def segment_seconds(job: Job, segment: SegmentShape, copies: float) -> dict[Phase, float]:
    """Seconds of an attention segment's f and b, and of its w where that is split off."""
    device, rows, dtype = job.cluster.device, job.batch.tokens, job.choices.precision.compute
    shared = job.shared_on_attention
    linears = [linear for layer in segment.layers for linear in layer.attention_side(shared=shared)]
    layers = device.gemms_seconds(linears, rows, dtype)
    head = device.gemms_seconds(segment.head, rows, dtype)
    elements = rows * sum(_elements(job, layer, copies) for layer in segment.layers)
    elementwise = device.memory_seconds(elements * job.choices.precision.width)
    ends = device.memory_seconds(rows * _end_bytes(job, segment))
    core = sum(_core_flops(job, layer) for layer in segment.layers) / device.peak(dtype)
    forward_core = core / device.efficiency.attention_forward
    backward_core = CORE_BACKWARD * core / device.efficiency.attention_backward
    input_gradient = layers + head + backward_core + ELEMENTWISE_BACKWARD * elementwise + ends
    if job.choices.recompute != "none":
        input_gradient += layers + forward_core + elementwise
    found: dict[Phase, float] = {"f": layers + head + forward_core + elementwise + ends}
    if job.choices.split_attention:
        found |= {"b": input_gradient, "w": layers + head}
    else:
        found |= {"b": input_gradient + layers + head}
    return _actions(job, "T" if segment.head else "A", found)


def expert_seconds(job: Job, experts: ExpertsShape) -> dict[Phase, float]:
    """Seconds of a layer's routed experts on the busiest F rank: f, b (input gradient) and w (weight gradient)."""
    device, dtype = job.cluster.device, job.choices.precision.compute
    load = load_of(job, experts)
    matrices = device.gemms_seconds(experts.expert, load.slots, dtype, groups=load.experts)
    elements = load.slots * (3 * experts.width + job.model.hidden)
    again = device.gemms_seconds(experts.expert[:-1], load.slots, dtype, groups=load.experts)
    if not job.shared_on_attention and experts.shared:
        tokens = job.layout.attention * job.batch.tokens / job.layout.ffn
        shared = device.gemms_seconds(experts.shared, tokens, dtype)
        matrices, again = matrices + shared, again + shared
        elements += tokens * (3 * experts.shared[-1].inputs + job.model.hidden)
    elementwise = device.memory_seconds(elements * job.choices.precision.width)
    backward = matrices + ELEMENTWISE_BACKWARD * elementwise + (again if job.choices.recompute_experts else 0.0)
    return _actions(job, "E", {"f": matrices + elementwise, "b": backward, "w": matrices})


def optimizer_seconds(job: Job, parameters: float) -> float:
    """One update of so many parameters: each value is read, and weights and state are written, once."""
    precision = job.choices.precision
    per_parameter = 2 * precision.weight_bytes + precision.gradient_bytes + 2 * precision.optimizer_bytes
    return job.cluster.device.action_seconds("O", job.cluster.device.memory_seconds(parameters * per_parameter))


def _actions(job: Job, kind: str, estimates: dict[Phase, float]) -> dict[Phase, float]:
    """Seconds of actions whose rooflines are known."""
    return {way: job.cluster.device.action_seconds(kind + way, seconds) for way, seconds in estimates.items()}


def _elements(job: Job, layer: LayerShape, copies: float) -> float:
    """Numbers per token that elementwise operations of a layer on an A rank read or write in the forward.

    14 H for two norms (4), two residual additions (6), casts and the router's input (4); 4 (q + kv) for rotary
    embedding and layout changes; 3 per column between the matrices of an MLP, as in a fused activation; 2 (copies + 1)
    H for packing the rows of a dispatch and adding up those of a combine.
    """
    hidden, attention = job.model.hidden, layer.attention
    found = 14.0 * hidden + 4 * (attention.query_width + attention.kv_width)
    found += 3 * layer.dense[-1].inputs if layer.dense else 0
    if layer.experts is not None:
        found += 2 * (copies + 1) * hidden
        if layer.experts.shared and job.shared_on_attention:
            found += 3 * layer.experts.shared[-1].inputs
    return found


def _end_bytes(job: Job, segment: SegmentShape) -> float:
    """Bytes per token that embedding and loss move: logits are copied to float32, and their softmax is as large."""
    width = job.choices.precision.width
    lookup = 2 * job.model.hidden * width if segment.embeds else 0
    return lookup + (job.model.vocab * (width + 12) if segment.head else 0)


def _core_flops(job: Job, layer: LayerShape) -> float:
    """Forward FLOPs of attention itself, for one micro-batch of an A rank."""
    attention = layer.attention
    return sum(n * attention.core_flops(mean_keys(n, attention.window)) for n in job.batch.lengths)
