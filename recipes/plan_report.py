"""A plan for people: tables of rich, and the picture of its first rounds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.allocate.formula import Stages
from lightning_afd.allocate.ratios import barrier, ratios
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.allocate.sensitivity import sensitivity
from lightning_afd.allocate.simulated import Ordering, shorter, simulated_pass
from lightning_afd.cost.times import step_costs
from lightning_afd.draw import draw_timeline
from lightning_afd.errors import PlanError

SHOWN = 10
SAMPLES = 256
"""Packed rows that are drawn from a sample of documents."""


def tables(request: Request, choice: PlanChoice) -> Iterable[Table | str]:
    """Candidates, choice, comparison, verdict, ratios and sensitivity, in this order."""
    yield candidates_table(choice)
    yield chosen_text(request, choice)
    yield collocated_table(choice)
    yield verdict_text(choice)
    yield ratios_text(request, choice)
    yield sensitivity_table(request, choice)


def candidates_table(choice: PlanChoice) -> Table:
    """The best way of each layout."""
    table = _table(
        "Candidates", "layout", "order, G", "passes x R", "recompute", "memory, GB", "formula, s", "simulated, s"
    )
    best: dict[object, Candidate] = {}
    for candidate in choice.candidates:
        best.setdefault(candidate.layout, candidate)
    for candidate in list(best.values())[:SHOWN]:
        passes = f"{candidate.passes} x {candidate.micro_batches}"
        recompute = candidate.recompute + (" + experts" if candidate.recompute_experts else "")
        order = f"{candidate.order}, {candidate.group}"
        memory, formula = f"{candidate.memory_bytes / 1e9:.1f}", f"{candidate.formula_seconds:.4g}"
        simulated = "" if candidate.simulated_seconds is None else f"{candidate.simulated_seconds:.4g}"
        table.add_row(candidate.layout.describe(), order, passes, recompute, memory, formula, simulated)
    return table


def chosen_text(request: Request, choice: PlanChoice) -> str:
    """The choice and why."""
    best, layout = choice.best, choice.best.layout
    used = f"{layout.world} of {request.cluster.devices} devices"
    lines = [
        f"Choice: {layout.describe()} on {used}, order {best.order} in runs of {best.group} at most; an optimizer "
        f"step has {best.passes} passes (accumulate_grad_batches) of {best.micro_batches} micro-batches.",
        f"Why: {best.seconds:.4g} s per step is the least of the simulated candidates; its busiest part needs "
        f"{best.bound_seconds:.4g} s ({best.bound_seconds / best.seconds:.0%}), which no order can beat. "
        f"{request.tokens / best.seconds:,.0f} tokens/s, {choice.utilisation:.1%} of the peak of the used devices.",
    ]
    if choice.division is not None:
        split = choice.division
        lines.append(
            f"The linear program (no bubbles, work of this layout) gives {split.attention}A + {split.ffn}F per group "
            f"with {split.attention_nics} and {split.ffn_nics} NICs."
        )
    return "\n".join(lines)


def collocated_table(choice: PlanChoice) -> Table:
    """Predictions of collocated layouts beside the plan."""
    table = _table(
        "Attention and experts on the same ranks (simulated in outline)", "layout", "sizes", "step, s", "to plan"
    )
    for found in choice.verdict.collocated:
        table.add_row(found.name, found.detail, f"{found.seconds:.4g}", f"{found.seconds / choice.best.seconds:.2f}")
    return table


def verdict_text(choice: PlanChoice) -> str:
    """The verdict, the regime and the ridge points."""
    sides = ", ".join(
        f"{name} {found.flops_per_byte:,.0f} of {found.ridge:,.0f}"
        for name, found in zip(("attention", "experts"), choice.verdict.intensities.values(), strict=True)
    )
    return (
        f"Verdict: {choice.verdict.sentence}\nThe plan is {choice.verdict.regime}; FLOPs that fit into the busy time "
        f"per byte between the sides, and the effective ridge point: {sides}."
    )


def ratios_text(request: Request, choice: PlanChoice) -> str:
    """What formulas of serving papers say of the layout."""
    best = choice.best
    stages = Stages.of(step_costs(request.job(best.layout, 1, best.rung)))
    found = ratios(stages, best.layout, fixed=3 * request.cluster.device.host_us * 1e-6)
    kept = ["attention", "experts", "transfers"]
    broken = [name for name, holds in zip(kept, found.rectangle, strict=True) if not holds]
    return (
        f"Formulas from serving: both sides balanced at {found.balanced:.2f} FFN ranks per attention rank (2504.02263; "
        f"the plan has {best.layout.ffn / best.layout.attention:.2f}), at least {found.least_micro_batches:.1f} "
        f"micro-batches (2504.02263), best A/F ratio {found.best_ratio:.2f} (2601.21351; the plan has "
        f"{best.layout.attention / best.layout.ffn:.2f}), "
        + (
            f"conditions of 2602.09721 broken by {' and '.join(broken)}."
            if broken
            else "conditions of 2602.09721 hold."
        )
    )


def sensitivity_table(request: Request, choice: PlanChoice) -> Table:
    """The layout with one thing changed each."""
    table = _table("Sensitivity of this layout (formula)", "with", "step, s", "tokens/s", "of the plan's")
    planned, *others = sensitivity(request, choice.best)
    for change in (planned, *others):
        if change.seconds is None or change.tokens_per_second is None or not planned.tokens_per_second:
            table.add_row(change.what, "does not fit", "", "")
            continue
        share = f"{change.tokens_per_second / planned.tokens_per_second:.2f}"
        table.add_row(change.what, f"{change.seconds:.4g}", f"{change.tokens_per_second:,.0f}", share)
    return table


def documents_table(documents: Sequence[int], choice: PlanChoice, request: Request) -> Iterable[str]:
    """What packed documents cost: attention ranks wait for the one with the largest sum of squared lengths."""
    if not documents:
        return
    length = max(request.batch.lengths)
    if min(documents) < 1:
        raise PlanError(f"data.documents has a length of {min(documents)}: lengths are at least 1")
    found, ranks = barrier(packed(documents, length, SAMPLES)), choice.best.layout.attention
    yield (
        f"Packed documents: the mean row has {found.mean / found.equal:.2f} of the squared lengths of one document of "
        f"{length} tokens, with a deviation of {found.deviation / found.mean:.2f} between rows; the slowest of "
        f"{ranks} attention ranks needs {found.factor(ranks):.2f} x the mean attention core time, and all others "
        "wait for it."
    )


def packed(documents: Sequence[int], length: int, rows: int) -> list[list[int]]:
    """Rows of `length` tokens, filled with documents drawn from a sample; the last one of a row is cut."""
    dice, found = random.Random(0), []
    for _ in range(rows):
        row: list[int] = []
        while sum(row) < length:
            row.append(min(dice.choice(documents), length - sum(row)))
        found.append(row)
    return found


def draw(request: Request, choice: PlanChoice, path: Path) -> None:
    """Two rounds of the ring, of two runs at most: a whole step has too many actions for a picture."""
    best = choice.best
    micro_batches = min(best.micro_batches, 2 * best.group, 16)
    job = shorter(request.job(best.layout, micro_batches, best.rung), 2)
    ordering = Ordering(order=best.order, group=best.group)
    timeline = simulated_pass(job, ordering, reduces=False).timeline
    layers = len(job.model.moe)
    title = (
        f"predicted: {best.layout.describe()}, {best.order}, the first {layers} of {len(request.model.moe)} MoE layers "
        f"and {micro_batches} micro-batches; one row per group of ranks"
    )
    draw_timeline(timeline, path, title)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
