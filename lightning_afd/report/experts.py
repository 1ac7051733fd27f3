"""The panel of experts: who got how many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_afd.recording import Recording
from lightning_afd.report.charts import HeatMap, heat_map
from lightning_afd.report.markup import count_text, element, legend
from lightning_afd.report.run import Run

SHADES = (("h0", "none"), ("h1", "< 1/4 of the row's mean"), ("h4", "about the mean"), ("h9", "> 3 times the mean"))


def experts(run: Run) -> str:
    """Two heat maps: tokens per expert and per F rank."""
    per_expert = element("h3", "Tokens per expert (experts in the order of their F ranks)")
    per_rank = element("h3", "Tokens per F rank (by its number in the layer's group)")
    maps = per_expert + heat_map(expert_map(run.chosen)) + per_rank + heat_map(rank_map(run.chosen))
    return element("p", spread_text(run.chosen)) + legend(SHADES) + maps


def expert_map(recording: Recording) -> HeatMap:
    """Tokens per expert; columns are experts in the order of the F ranks that own them in layer 0."""
    owners = recording.expert_maps[0].expert_to_rank
    order = sorted(range(len(owners)), key=lambda expert: (owners[expert], expert))
    borders = [place for place in range(1, len(order)) if owners[order[place]] != owners[order[place - 1]]]
    width = max(map(len, recording.tokens_per_expert))
    order += range(len(order), width)
    return HeatMap(
        rows=tuple(
            tuple(tokens[expert] if expert < len(tokens) else 0 for expert in order)
            for tokens in recording.tokens_per_expert
        ),
        row_names=_layers(recording),
        column_names=tuple(map(str, order)),
        borders=tuple(borders),
    )


def rank_map(recording: Recording) -> HeatMap:
    """Tokens per F rank of the layer's group."""
    return HeatMap(
        rows=recording.tokens_per_rank(),
        row_names=_layers(recording),
        column_names=tuple(map(str, range(recording.timeline.layout.ffn))),
    )


def _layers(recording: Recording) -> tuple[str, ...]:
    return tuple(f"layer {layer}" for layer in range(recording.shape.layers))


def spread_text(recording: Recording) -> str:
    """The figures to look at first."""
    experts = max(map(_over_mean, recording.tokens_per_expert))
    ranks = max(map(_over_mean, recording.tokens_per_rank()))
    dead = sum(tokens.count(0) for tokens in recording.tokens_per_expert)
    return (
        f"Busiest expert of any layer: {experts:.2f} times its layer's mean; busiest F rank: {ranks:.2f} times; "
        f"{count_text(dead, 'expert')} without a token."
    )


def _over_mean(counts: Sequence[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
