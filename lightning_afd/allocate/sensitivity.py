"""What a plan is sensitive to: its layout at other lengths, routing, sizes of the expert group and imbalance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_afd.allocate.candidates import ways
from lightning_afd.allocate.fit import Fitting
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.cost.job import BatchShape
from lightning_afd.cost.model import LayerShape, ModelShape
from lightning_afd.placement import Layout


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that is different."""

    what: str
    seconds: float | None
    """Of a step by the formula; None: does not fit into memory, or into the cluster."""
    tokens_per_second: float | None


def sensitivity(request: Request, choice: Candidate) -> list[Change]:
    """The formula's step time of the choice's layout, as planned (first) and with one thing changed each."""
    return [_changed(what, other, layout) for what, other, layout in _variants(request, choice.layout)]


def _variants(request: Request, layout: Layout) -> Iterator[tuple[str, Request, Layout]]:
    yield "as planned", request, layout
    for factor in (0.5, 2):
        lengths = tuple(max(1, int(length * factor)) for length in request.batch.lengths)
        other = replace(request, batch=BatchShape(lengths=lengths))
        yield f"sequences of {max(lengths)} tokens", other, layout
    for factor in (0.5, 2):
        model = with_top_k(request.model, factor)
        yield f"top-{model.moe[0].top_k} routing", replace(request, model=model), layout
    for ffn in (layout.ffn // 2, layout.ffn * 2):
        if ffn:
            yield f"{ffn} FFN ranks per group", request, replace(layout, ffn=ffn)
    for imbalance in (1.2, 1.5):
        uneven = replace(request.choices, imbalance=request.choices.imbalance * imbalance)
        yield f"busiest FFN rank {imbalance} x the mean", replace(request, choices=uneven), layout
    if request.choices.dedup == "rank" and _shares_nodes(request, layout):
        yield "one copy per node (dedup=node)", replace(request, choices=replace(request.choices, dedup="node")), layout


def _shares_nodes(request: Request, layout: Layout) -> bool:
    """Whether FFN ranks of a group share a node while not all ranks do."""
    ranks = request.cluster.devices_per_node
    return layout.world > ranks and replace(layout, node_ranks=ranks).spreads


def with_top_k(model: ModelShape, factor: float) -> ModelShape:
    """The model with another number of experts per token, within what it has."""

    def changed(layer: LayerShape) -> LayerShape:
        if layer.experts is None:
            return layer
        top_k = min(layer.experts.experts, max(1, int(layer.experts.top_k * factor)))
        return replace(layer, experts=replace(layer.experts, top_k=top_k))

    return replace(model, layers=tuple(changed(layer) for layer in model.layers))


def _changed(what: str, request: Request, layout: Layout) -> Change:
    experts = min(layer.experts for layer in request.model.moe)
    if layout.world > request.cluster.devices or layout.ffn > experts:
        return Change(what=what, seconds=None, tokens_per_second=None)
    found = [way.seconds for way in ways(request, Fitting(request), layout)]
    if not found:
        return Change(what=what, seconds=None, tokens_per_second=None)
    return Change(what=what, seconds=min(found), tokens_per_second=request.tokens / min(found))
