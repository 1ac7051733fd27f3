"""Bytes per rank: weights, gradients, optimizer state, activations in flight, messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lightning_afd.cost.in_flight import Change, peak
from lightning_afd.cost.job import Job
from lightning_afd.cost.model import ExpertsShape, LayerShape, SegmentShape, parameters_of
from lightning_afd.cost.traffic import load_of
from lightning_afd.cost.transfers import ROUTING_BYTES, layer_traffic, row_bytes, slots_of
from lightning_afd.expert_map import split_sizes
from lightning_afd.placement import Role, Worker
from lightning_afd.schedule.actions import Action

WIDE = 4
"""Bytes of float32, in which norms, router and loss work whatever the precision."""
INDEX_BYTES = 3 * 8
"""Token, slot and expert of a row of the grouped GEMMs (int64)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank of a worker group."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float
    """Buffers of messages that are awaited or on their way."""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))


def memory_of(job: Job, worker: Worker, activations: float) -> Memory:
    """The memory of a worker's fullest rank, given the bytes of its activations in flight."""
    precision = job.choices.precision
    attention = worker.role == "A"
    trained = dense_parameters(job, worker.group) if attention else expert_parameters(job, worker.group, 0)
    copies = job.model.final_norm_parameters if attention and worker.group else 0  # kept, but not trained
    lower = trained * precision.width if precision.width < precision.weight_bytes else 0  # kept by F ranks
    shards = job.layout.attention if attention and job.choices.shard_optimizer else 1
    return Memory(
        weights=(trained + copies) * precision.weight_bytes + (0 if attention else lower),
        gradients=trained * precision.gradient_bytes,
        optimizer=trained * precision.optimizer_bytes / shards,
        activations=activations,
        messages=_messages(job, worker),
    )


def dense_parameters(job: Job, group: int) -> int:
    """Parameters that each A rank of a group trains."""
    model, shared = job.model, job.shared_on_attention
    found = sum(layer.attention_parameters(shared=shared) for s in _own(job, group) for layer in s.layers)
    if group:
        return found
    embedding = model.vocab * model.hidden
    return found + embedding + model.final_norm_parameters + (0 if model.tied else embedding)


def expert_parameters(job: Job, group: int, index: int) -> int:
    """Parameters that F rank number `index` of a group trains."""
    own = job.model.moe[group :: job.layout.depth]
    found = sum(split_sizes(e.experts, job.layout.ffn)[index] * e.expert_parameters for e in own)
    return found + (0 if job.shared_on_attention else sum(parameters_of(e.shared) for e in own))


def scheduled_activations(job: Job, worker: Worker, program: Iterable[Action]) -> float:
    """Bytes of activations at the fullest moment of a worker's program, exactly as it keeps and frees them."""
    return peak(program, activation_change(job, worker.role))


def activation_change(job: Job, role: Role) -> Change:
    """By how many bytes an action changes what a worker of a role keeps."""
    return _attention_change(job) if role == "A" else _experts_change(job)


def bounded_activations(job: Job, worker: Worker, held: int) -> float:
    """The same from a number of forwards in flight alone (`pipelined`), from above: each as large as the largest."""
    if worker.role == "F":
        sizes = [_expert_bytes(job, experts) for experts in set(job.model.moe[worker.group :: job.layout.depth])]
        return max(held * saved + max(0.0, pending - saved) for saved, pending in sizes)
    segments = [segment for segment in _own(job, worker.group) if not segment.head]
    tails = [segment_bytes(job, segment) for segment in _own(job, worker.group) if segment.head]
    return held * max(segment_bytes(job, segment) for segment in segments) + sum(tails)


def segment_bytes(job: Job, segment: SegmentShape) -> float:
    """What an A rank keeps of one segment and micro-batch until its backward.

    Per token: the leaf h and the base that the runtime holds, and what autograd saves of each layer; the tail's logits
    in the computation's dtype, their float32 softmax and its gradient.
    """
    width, stream = job.choices.precision.width, job.choices.precision.stream_width
    hidden, recompute = job.model.hidden, job.choices.recompute
    leaf = hidden * stream if stream < WIDE else 0  # else the first norm's input is the leaf itself
    found = leaf + hidden * stream + sum(_layer_bytes(job, layer, recompute) for layer in segment.layers)
    if segment.head:
        found += _norm_bytes(hidden, stream) + hidden * width + job.model.vocab * 2 * (width + WIDE)
    return job.batch.tokens * found + _cast_bytes(job, segment)


def _cast_bytes(job: Job, segment: SegmentShape) -> float:
    """Under autocast the graph of each segment and micro-batch keeps its own lower copies of the weights it read."""
    precision = job.choices.precision
    if precision.width >= precision.weight_bytes:
        return 0.0
    recomputed = job.choices.recompute != "none"
    layers = () if recomputed else segment.layers
    matrices = sum(parameters_of(layer.attention_side(shared=job.shared_on_attention)) for layer in layers)
    return (matrices + parameters_of(segment.head)) * precision.width


def _layer_bytes(job: Job, layer: LayerShape, recompute: str) -> float:
    """Bytes per token that one layer saves: inputs of its matrices, of its norms, of attention and of activations.

    "full" keeps the layer's input and the rows for the experts; "attention" what lies outside of its heavy parts.
    """
    width, stream = job.choices.precision.width, job.choices.precision.stream_width
    hidden, attention, experts = job.model.hidden, layer.attention, layer.experts
    if recompute == "full":
        return hidden * stream + (0 if experts is None else hidden * stream + experts.top_k * (WIDE + 8))
    found = 2 * (_norm_bytes(hidden, stream) + hidden * width)
    found += hidden * stream if width < stream and experts is not None else 0  # rows before their cast
    found += 0 if experts is None else 3 * WIDE * experts.experts
    if recompute == "attention":
        return found
    found += attention.saved_width * width
    found += _norm_bytes(attention.normed_width, width)
    dense = layer.dense if experts is None else experts.shared if job.shared_on_attention else ()
    return found + (4 * dense[-1].inputs * width if dense else 0)


def _norm_bytes(columns: int, width: int) -> float:
    """A norm saves its float32 input (a copy, in lower precision) and the normed rows."""
    return columns * (max(WIDE, width) + width)


def _expert_bytes(job: Job, experts: ExpertsShape) -> tuple[float, float]:
    """Bytes on the busiest F rank of one layer and micro-batch: after the forward, and after the input gradient.

    Forward leaves x, weights, ids and the values before the activation (not with recompute); the input gradient leaves
    x, dY, the values after the activation and the gradient of those before it.
    """
    width = job.choices.precision.width
    load, row = load_of(job, experts), row_bytes(job)
    index = load.slots * INDEX_BYTES
    z = load.slots * experts.wide * width
    saved = load.tokens * (row + 2 * experts.top_k * ROUTING_BYTES) + index
    saved += 0 if job.choices.recompute_experts else z
    pending = load.tokens * (2 * row + 2 * experts.top_k * ROUTING_BYTES) + index + z
    pending += load.slots * (experts.width * width + ROUTING_BYTES)
    if experts.shared and not job.shared_on_attention:
        tokens = job.layout.attention * job.batch.tokens / job.layout.ffn
        shared = tokens * (2 * row + 4 * experts.shared[-1].inputs * width)
        saved, pending = saved + (tokens * row if job.choices.recompute_experts else shared), pending + shared
    return saved, pending


def _attention_change(job: Job) -> Change:
    known = {segment: segment_bytes(job, segment) for segment in set(job.model.segments)}
    sizes = [known[segment] for segment in job.model.segments]
    last = "w" if job.choices.split_attention else "b"

    def change(action: Action) -> float:
        if action.op != "A" or action.phase not in ("f", last):
            return 0.0
        return sizes[action.layer] if action.phase == "f" else -sizes[action.layer]

    return change


def _experts_change(job: Job) -> Change:
    known = {experts: _expert_bytes(job, experts) for experts in set(job.model.moe)}
    sizes = [known[experts] for experts in job.model.moe]

    def change(action: Action) -> float:
        if action.op != "E":
            return 0.0
        saved, pending = sizes[action.layer]
        return {"f": saved, "b": pending - saved, "w": -pending}[action.phase]

    return change


def _messages(job: Job, worker: Worker) -> float:
    """One awaited message per micro-batch of each peer, as receives are posted ahead, at the size of a dispatch."""
    layer = worker.group
    rows = layer_traffic(job, layer, "f")
    side = rows.attention if worker.role == "A" else rows.ffn
    per_row = row_bytes(job) + 2 * slots_of(job, layer) * ROUTING_BYTES
    return job.micro_batches * (side.nic_rows + side.local_rows) * per_row


def _own(job: Job, group: int) -> tuple[SegmentShape, ...]:
    """The segments of an A group."""
    segments = job.model.segments
    return segments[:-1][group :: job.layout.depth] + (() if group else segments[-1:])
