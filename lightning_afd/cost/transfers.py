"""Bytes and seconds of the messages of one micro-batch.

Message sizes are those of the engine's wire format without headers: a dispatch carries x, weights and local expert ids
of each row, its answer y; backward dY, and dx with the weights' gradients. A hop carries the base and the token of each
copy, back its gradient; under autocast both are as wide as the parameters, while rows for F ranks are cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_afd.cost.job import Job
from lightning_afd.cost.model import ExpertsShape
from lightning_afd.cost.routing import visits
from lightning_afd.cost.traffic import Side, Traffic, traffic
from lightning_afd.schedule.actions import Action, Op, Phase

ROUTING_BYTES = 4
"""A routing weight (float32) or a local expert id (int32)."""
TOKEN_BYTES = 8
"""The token of a copy (int64)."""
LOGIT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ActionCost:
    """One action of one micro-batch on the busiest rank. A computation has only `seconds`."""

    seconds: float
    """A computation's time; a transfer's from its start to its last byte, on idle links."""
    latency: float = 0.0
    """Of a transfer: the part of `seconds` in which no link is busy."""
    sent_bytes: float = 0.0
    """Of a transfer: what one sender sends."""
    received_bytes: float = 0.0
    """Of a transfer: what one receiver gets."""
    send_seconds: float = 0.0
    """Of a transfer: how long a sender's links are busy with it."""
    receive_seconds: float = 0.0
    """Of a transfer: how long a receiver's links are busy with it."""
    over_nic: bool = False
    """Of a transfer: whether any of it leaves the node."""
    sender_seconds: float = 0.0
    """Of a transfer: how long it keeps the core of a sender from computing."""
    receiver_seconds: float = 0.0
    """Of a transfer: the same of a receiver."""


def transfers(job: Job, layer: int) -> Iterator[tuple[Op, Phase, ActionCost]]:
    """D and C of a layer, and H and L where they exist."""
    shape, experts, row = job.shape, job.model.moe[layer], row_bytes(job)
    slots = slots_of(job, layer)
    before, after = layer_traffic(job, layer, "f"), layer_traffic(job, layer, "b")
    yield "D", "f", _exchange(job, before, row + 2 * slots * ROUTING_BYTES, to_ffn=True)
    yield "C", "f", _exchange(job, after, row, to_ffn=False)
    yield "D", "b", _exchange(job, after, row, to_ffn=True)
    yield "C", "b", _exchange(job, before, row + slots * ROUTING_BYTES, to_ffn=False)
    tokens, base = job.batch.tokens, job.model.hidden * job.choices.precision.stream_width
    if shape.hops(layer):
        yield "H", "f", _hop(job, Action("H", layer, "f", 0), tokens * (base + TOKEN_BYTES * before.copies))
        yield "H", "b", _hop(job, Action("H", layer, "b", 0), tokens * base)
    if shape.sends_logits(layer):
        logits = tokens * experts.experts * LOGIT_BYTES
        yield "L", "f", _hop(job, Action("L", layer, "f", 0), logits)
        yield "L", "b", _hop(job, Action("L", layer, "b", 0), logits)


def layer_traffic(job: Job, layer: int, phase: Phase) -> Traffic:
    """Rows between the experts of a layer and the A group before them (D forward, C backward), or after them (b)."""
    shape = job.shape
    sender = shape.attention(layer if phase == "f" else layer + 1)
    return traffic(job, job.model.moe[layer], sender, shape.experts(layer))


def row_bytes(job: Job) -> int:
    """Hidden state of one token."""
    return job.model.hidden * job.choices.precision.width


def slots_of(job: Job, layer: int) -> int:
    """Routing weights of a row: K, and one more where F ranks compute shared experts."""
    experts = job.model.moe[layer]
    return experts.top_k + (bool(experts.shared) and not job.shared_on_attention)


def least_nic_seconds(job: Job, experts: ExpertsShape) -> float:
    """What NICs are busy with at least for a layer and micro-batch, wherever the ranks are: rows of dispatch, or of its
    answer, forward and backward, to all ranks of the other side but those of one node."""
    cluster, layout, choices = job.cluster, job.layout, job.choices
    node, owned = cluster.devices_per_node, experts.experts // layout.ffn
    rows = visits(owned, experts.experts, experts.top_k)
    if choices.dedup == "node":
        rows = visits(min(experts.experts, owned * node), experts.experts, experts.top_k) / node
    sides = (layout.attention - node) / choices.ffn_nics, (layout.ffn - 2 * node + 1) / choices.attention_nics
    nbytes = 2 * job.batch.tokens * rows * row_bytes(job) * max(0.0, *sides)
    return cluster.nic.busy_seconds(nbytes, 1, cluster.ports)


def _exchange(job: Job, rows: Traffic, bytes_per_row: float, *, to_ffn: bool) -> ActionCost:
    """A dispatch or combine: all A ranks of a group with all F ranks of one."""
    choices = job.choices
    attention = _links_busy(job, rows.attention, bytes_per_row, choices.attention_nics)
    ffn = _links_busy(job, rows.ffn, bytes_per_row, choices.ffn_nics)
    totals = [(side.nic_rows + side.local_rows) * bytes_per_row for side in (rows.attention, rows.ffn)]
    (sent, received), (send, receive) = (totals, (attention, ffn)) if to_ffn else (totals[::-1], (ffn, attention))
    over_nic = rows.attention.nic_rows > 0
    link = job.cluster.nic if over_nic else job.cluster.nvlink
    sides = (rows.attention, rows.ffn) if to_ffn else (rows.ffn, rows.attention)
    sender, receiver = (link.host_seconds(total, s.peers) for total, s in zip((sent, received), sides, strict=True))
    return ActionCost(
        seconds=link.latency + max(send, receive),
        latency=link.latency,
        sent_bytes=sent,
        received_bytes=received,
        send_seconds=send,
        receive_seconds=receive,
        over_nic=over_nic,
        sender_seconds=sender,
        receiver_seconds=receiver,
    )


def _links_busy(job: Job, side: Side, bytes_per_row: float, nics: float) -> float:
    """Seconds in which a rank's links are busy; those inside the node and its NICs work at the same time."""
    cluster = job.cluster
    nic = cluster.nic.busy_seconds(side.nic_rows * bytes_per_row, side.peers, cluster.ports * nics)
    return max(nic, cluster.nvlink.busy_seconds(side.local_rows * bytes_per_row, side.peers))


def _hop(job: Job, action: Action, nbytes: float) -> ActionCost:
    """One message between the same replicas of two A groups."""
    cluster, layout = job.cluster, job.layout
    sender, receiver = job.shape.endpoints(action)
    pairs = zip(layout.ranks_of(sender), layout.ranks_of(receiver), strict=True)
    over_nic = any(cluster.node_of(one) != cluster.node_of(other) for one, other in pairs)
    link = cluster.nic if over_nic else cluster.nvlink
    busy = link.busy_seconds(nbytes, 1, cluster.ports * job.choices.attention_nics if over_nic else 1.0)
    return ActionCost(
        seconds=link.latency + busy,
        latency=link.latency,
        sent_bytes=nbytes,
        received_bytes=nbytes,
        send_seconds=busy,
        receive_seconds=busy,
        over_nic=over_nic,
        sender_seconds=link.host_seconds(nbytes),
        receiver_seconds=link.host_seconds(nbytes),
    )
