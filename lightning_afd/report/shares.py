"""The panels of how ranks spend a step: shares of it, and what they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_afd.placement import Layout
from lightning_afd.report.charts import stacked_bar
from lightning_afd.report.markup import NONE, count_text, element, legend, seconds_text, table, text
from lightning_afd.report.run import Run
from lightning_afd.waits import CAUSES, Quantiles, Usage, mean_usage, waits_by_message, waits_by_stage

PARTS = {
    "compute": "computation (A and F ranks)",
    "send": "packing and sending",
    "reduce": "sums of gradients",
    "wait_for_A": "wait_for_A",
    "wait_for_net": "wait_for_net",
    "wait_for_F": "wait_for_F",
    "bubble": "bubble",
}


def shares(run: Run) -> str:
    """How each rank, and the average one of each worker, spends the step."""
    rows = [share_row(name, usage) for name, usage in usages(run).items()]
    head = ("", "share of the step", "busy", "exposed", "bubble")
    return legend((f"part {name}", label) for name, label in PARTS.items()) + table(head, rows, "shares")


def usages(run: Run) -> dict[str, Usage]:
    """Usage by rank; where a worker has several, their average stands before them."""
    found, layout = {}, run.chosen.timeline.layout
    for ranks, workers in _grouped(layout).items():
        own = [rank for rank in ranks if rank in run.usage]
        if len(own) > 1:
            found[f"{workers}, mean of {len(own)}"] = mean_usage(run.usage[rank] for rank in own)
        found |= {layout.name_of(rank): run.usage[rank] for rank in own}
    return found


def _grouped(layout: Layout) -> dict[Sequence[int], str]:
    """The ranks of each worker, with its name, or the names of both where they are the same."""
    found: dict[Sequence[int], str] = {}
    for worker in layout.workers():
        ranks = layout.ranks_of(worker)
        found[ranks] = f"{found[ranks]}, {worker}" if ranks in found else str(worker)
    return found


def share_row(name: str, usage: Usage) -> list[str]:
    """Name, bar and shares of one rank."""
    own = usage.shares()
    bar = stacked_bar({f"part {part}": own[part] for part in PARTS})
    return [text(name), bar, *(f"{own[part]:z.1%}" for part in ("busy", "exposed", "bubble"))]


def waits(run: Run) -> str:
    """Two tables of quantiles: by message and by stage."""
    by_message, by_stage = waits_by_message(run.all_waits), waits_by_stage(run.all_waits, run.chosen.shape)
    messages = {message_text(kind): by_message[kind] for kind in by_message}
    stages = {stage_text(stage): by_stage[stage] for stage in sorted(by_stage, key=_stage_key)}
    steps = element(
        "p", text(f"Over {count_text(len(run.pooled), 'recorded step')} of this layout and schedule, all ranks.")
    )
    return (
        steps
        + table(("message", *WAIT_HEAD), wait_rows(messages), "quantiles", WAIT_SPANS)
        + table(("stage that needs it", *WAIT_HEAD), wait_rows(stages), "quantiles", WAIT_SPANS)
    )


WAIT_SPANS = (("", 2), *((cause, 3) for cause in CAUSES), ("", 1))
WAIT_HEAD = ("receives", *("P50", "P95", "P99") * len(CAUSES), "waited in all")
MESSAGES = {
    **{"D": "dispatch", "C": "combine", "H": "hop", "L": "router logits"},
    **{"X": "spread inside nodes", "Y": "gather inside nodes"},
}
WAYS = {"f": "forward", "b": "backward"}
STAGES = {"A": "attention segment", "E": "experts of layer", "T": "head"}


def message_text(kind: str) -> str:
    """`dispatch forward (Df)`."""
    return f"{MESSAGES[kind[0]]} {WAYS[kind[1]]} ({kind})"


def stage_text(stage: str) -> str:
    """`experts of layer 3 (E3)`."""
    return f"{STAGES[stage[0]]} {stage[1:]} ({stage})"


def wait_rows(by_name: Mapping[str, Mapping[str, Quantiles]]) -> list[list[str]]:
    """A row per name: how many receives, three quantiles of each cause, and the sum of all of them."""
    rows = []
    for name, causes in by_name.items():
        quantiles = [q for cause in CAUSES for q in _three(causes.get(cause))]
        total = sum(q.total for q in causes.values())
        rows.append([text(name), f"{causes['wait_for_net'].count:,}", *quantiles, seconds_text(total)])
    return rows


def _three(quantiles: Quantiles | None) -> list[str]:
    """P50, P95 and P99, or that there are none: a message of an A rank is not waited for because of an F rank."""
    return [NONE] * 3 if quantiles is None else [seconds_text(q) for q in (quantiles.p50, quantiles.p95, quantiles.p99)]


def _stage_key(stage: str) -> tuple[int, str]:
    return int(stage[1:]), stage[0]
