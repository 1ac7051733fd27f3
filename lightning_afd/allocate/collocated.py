"""Step times of layouts in which every rank has attention and experts: what disaggregation has to beat.

Each method of `lightning_afd.baselines` with the experts shared by the ranks of one node, and of two, its pipeline and
recomputation tuned, in outline: quick enough for a command, and within 1 % of the whole simulation, or 6 % where
micro-batches overlap in a pipeline of few layers per stage (tests/baselines/test_outline.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_afd.allocate.request import RUNGS, Recompute, Request
from lightning_afd.baselines.predict import outlined
from lightning_afd.placement import Layout

NAMES = {
    "exposed": "experts",
    "experts-only": "experts-only overlap",
    "flowmoe": "FlowMoE",
    "dualpipe": "DualPipe",
}
WHERE = {1: "inside a node", 2: "across two nodes"}
"""Of how many nodes the ranks share the experts of a layer."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A layout and what a step of it takes."""

    name: str
    seconds: float
    detail: str
    """Sizes, for people."""
    memory_bytes: float
    micro_batches: int | None = None
    """Per step and rank, where a strategy can do the same; what is computed again stands below."""
    recompute: Recompute = "none"
    recompute_experts: bool = False


Predict = Callable[[Request], Prediction | None]
"""The best layout of one kind, None where the cluster or memory has no room for it."""


def baselines() -> dict[str, Predict]:
    """The layouts to compare with, by name."""
    kinds = ((f"{name} {where}", method, nodes) for method, name in NAMES.items() for nodes, where in WHERE.items())
    return {name: partial(predict, name, method, nodes) for name, method, nodes in kinds}


def predict(name: str, method: str, nodes: int, request: Request) -> Prediction | None:
    """The fastest setting of a method that fits, with experts shared by the ranks of so many nodes."""
    ranks = sharing(request, nodes)
    if ranks is None:
        return None
    job = request.job(Layout(attention=1, ffn=1), request.parts, RUNGS[0])
    best = outlined(job, method, ranks, request.rungs, whole=RUNGS[-1] in request.rungs)
    if best is None:
        return None
    detail = f"{best.setting.describe()}, R={best.costs.shape.micro_batches // best.costs.parts}"
    return Prediction(name=name, seconds=best.seconds, detail=detail, memory_bytes=best.memory)


def sharing(request: Request, nodes: int) -> int | None:
    """Ranks that share the experts of a layer; a node with more ranks than experts has several such groups."""
    cluster, experts = request.cluster, min(layer.experts for layer in request.model.moe)
    if nodes == 1:
        each = cluster.devices_per_node
        return max(ranks for ranks in range(1, each + 1) if each % ranks == 0 and ranks <= experts)
    ranks = nodes * cluster.devices_per_node
    return ranks if ranks <= min(experts, cluster.devices) and cluster.devices % ranks == 0 else None
