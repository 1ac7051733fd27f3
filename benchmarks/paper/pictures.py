"""Pictures of the report, from the same values as its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paper.choices import RATIOS, by_ratio
from paper.flowmoe import PUBLISHED, all_times
from paper.jobs import LENGTHS, MODELS
from paper.shares import NODES, by_length, by_nodes
from paper.throughput import COLUMNS, case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#4c78a8", "#f2a65a", "#6fb58a", "#9d7bb0", "#c8621b", "#1f3f66")


def speeds(folder: Path) -> None:
    """Figure 10: speed of separate workers over each method."""
    figure = _figure(14, 4)
    for axes, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
        values = {column: [case(model, length).speedup(column) for length in LENGTHS] for column in COLUMNS}
        _bars(axes, [f"{length // 1024}K" for length in LENGTHS], values)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"{model}: step of a method / step of AFD", loc="left", fontsize=10)
    _save(figure, folder / "paper_speed.png")


def ratios(folder: Path) -> None:
    """Figure 12: the best ratio of attention to expert ranks moves with the length."""
    figure = _figure(7, 4)
    axes = figure.subplots()
    for color, length in zip(COLORS, LENGTHS, strict=False):
        axes.plot(range(len(RATIOS)), list(by_ratio(length).values()), "o-", color=color, label=f"{length} tokens")
    axes.set_xticks(range(len(RATIOS)), [f"{attention}A:{ffn}F" for attention, ffn in RATIOS])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title("DeepSeek-MoE on 128 GPUs: speed over 1F1B, EP16, a row per expert", loc="left", fontsize=10)
    _save(figure, folder / "paper_ratio.png")


def shares(folder: Path) -> None:
    """Figures 3 and 6: what is not computation."""
    figure = _figure(12, 4)
    left, right = figure.subplots(1, 2)
    for color, (dedup, efficiency, name) in zip(COLORS, _ways(), strict=False):
        left.plot(NODES, by_nodes(dedup, efficiency), "o-", color=color, label=name)
    left.plot([1, 8], [0.22, 0.78], "k*", markersize=9, linestyle="none", label="paper")
    left.set_xscale("log", base=2)
    left.set_xticks(NODES, [str(nodes) for nodes in NODES])
    left.set_xlabel("nodes")
    left.set_ylim(0, 1)
    left.set_title("share of all-to-all by nodes (DeepSeek-MoE, 8192)", loc="left", fontsize=10)
    left.legend(fontsize=8, frameon=False)
    found = by_length("node", 0.8)
    values = {
        name: [share[part] for share in found] for part, name in enumerate(("attention", "experts", "all-to-all"))
    }
    _bars(right, [f"{length // 1024}K" for length in LENGTHS], values)
    for part, (first, last) in enumerate(((0.284, 0.503), (0.192, 0.140), (0.524, 0.358))):
        places = [0 + (part - 1) * 0.8 / 3, 3 + (part - 1) * 0.8 / 3]
        right.plot(places, [first, last], "k*", markersize=9, linestyle="none", label="paper" if part == 2 else None)
    right.set_title("shares of Qwen3 on 8 nodes, a row per node, 0.8", loc="left", fontsize=10)
    right.legend(fontsize=8, frameon=False)
    figure.savefig(folder / "paper_shares.png", dpi=110)


def _ways() -> list[tuple[str, float, str]]:
    return [
        ("none", 0.8, "a row per expert, 0.8"),
        ("none", 0.45, "a row per expert, 0.45"),
        ("node", 0.8, "a row per node, 0.8"),
        ("node", 0.45, "a row per node, 0.45"),
    ]


def flowmoe(folder: Path) -> None:
    """FlowMoE: speed over vanilla expert parallelism, step by step."""
    figure = _figure(10, 4)
    axes = figure.subplots()
    names = {"experts": "experts", "attention": "+ attention", "tuned": "experts, + chunks", "all": "all"}
    values = {text: [found["vanilla"] / found[key] for found in all_times().values()] for key, text in names.items()}
    values["published"] = [times[0] / times[-1] for times in PUBLISHED.values()]
    _bars(axes, list(PUBLISHED), values)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title("FlowMoE: speed over vanilla expert parallelism", loc="left", fontsize=10)
    _save(figure, folder / "paper_flowmoe.png")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _bars(axes: Axes, labels: Sequence[str], values: Mapping[str, Sequence[float]]) -> None:
    width = 0.8 / len(values)
    for index, (color, (name, heights)) in enumerate(zip(COLORS, values.items(), strict=False)):
        places = [place + (index - (len(values) - 1) / 2) * width for place in range(len(labels))]
        axes.bar(places, heights, width, color=color, label=name)
    axes.set_xticks(range(len(labels)), labels)


def _save(figure: Figure, path: Path) -> None:
    """Write a picture with one legend below."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


PICTURES = (speeds, ratios, shares, flowmoe)
