"""A result for people: tables of rich, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.table import Table

from lightning_afd.bench.ratios import Spread
from lightning_afd.bench.result import SAME_LOSS, Measured, Result, Section

COLUMNS = (
    "contender",
    "step, s",
    "x first",
    "x its bound",
    "bound by",
    "MB",
    "loss",
    "waits",
    "engine",
)
EXPLANATION = (
    "Medians, and quartiles in brackets. x first: paired ratios of the step to that of the first contender. x its "
    "bound: step over max(computation alone, bytes / link rate), measured in the same repetition. MB: bytes of a step "
    "in the busiest direction of a rank. waits: share of the step in which ranks wait for messages. engine: the "
    "engine's own work over the step."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender, in words."""

    cells: tuple[str, ...]


def rows(section: Section) -> Iterator[Row]:
    """The contenders of a section, as they were asked for."""
    for one in section.measured:
        bound = one.over_bound
        yield Row(
            cells=(
                one.name if not one.plan else f"{one.name} ({one.plan})",
                f"{Spread.of(one.seconds):.3f}",
                f"{section.ratio(one.name):.2f}",
                f"{bound:.2f}" if bound else "-",
                one.bound_by or "-",
                f"{one.step_bytes / 1e6:.1f}" if one.step_bytes else "-",
                f"{one.losses[-1]:.5f}",
                f"{_waits(one):.0%}" if one.usage else "-",
                f"{max(one.overhead.values()):.1%}" if one.overhead else "-",
            )
        )


def _waits(one: Measured) -> float:
    """Share of the step, on the average of the ranks."""
    return sum(usage["exposed"] for usage in one.usage.values()) / len(one.usage)


def tables(result: Result) -> Iterable[Table | str]:
    """What is printed: per section its contenders, stages of the first one and more; in the end a line each."""
    for section in result.sections:
        table = Table(title=heading(section), title_justify="left", title_style="bold", pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("contender", "bound by") else "right")
        for row in rows(section):
            table.add_row(*row.cells)
        yield table
        yield from lines(section)
        if section.measured[0].stages:
            yield stages_table(section.measured[0])
    yield EXPLANATION
    for section in result.sections:
        yield section.summary


def heading(section: Section) -> str:
    """The condition, with what was measured of it."""
    rate = Spread.of([8 * rate / 1e9 for rate in section.link_rates])
    return f"{section.title}: links of {rate:.3f} Gbit/s measured, {rate.count} repetitions"


def lines(section: Section) -> Iterator[str]:
    """What does not fit into the table."""
    alone = ", ".join(f"{role} {Spread.of(seconds):.3f} s" for role, seconds in section.compute.items())
    yield f"computation alone: {alone}"
    loss, count = section.disagreement, sum(one.same_weights for one in section.measured)
    verdict = "agree" if loss <= SAME_LOSS else "DO NOT AGREE"
    yield f"losses of {count} contenders {verdict} (largest relative difference {loss:.1e})"
    if section.foreign_cpu:
        yield f"CPU time of others per repetition: {Spread.of(section.foreign_cpu):.2f} s"
    if section.measured[0].advice:
        yield f"{section.measured[0].name}: {section.measured[0].advice}"
    yield from section.notes


def stages_table(one: Measured) -> Table:
    """How long actions and waits of one contender take."""
    table = Table(title=f"{one.name}, ms per action or wait", title_justify="left", pad_edge=False)
    for column in ("stage", "count", "P50", "P95", "P99"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage, figures in sorted(one.stages.items()):
        table.add_row(stage, str(int(figures["count"])), *(f"{figures[p] * 1e3:.2f}" for p in ("p50", "p95", "p99")))
    return table


def markdown(result: Result) -> str:
    """The tables of contenders, with command and machine."""
    machine, parts = result.machine, []
    what = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    parts.append(
        f"`{result.command}` on {machine['ranks']} ranks, {what}, torch {machine['torch']}, load {machine['load']}."
    )
    for section in result.sections:
        table = [f"**{heading(section)}**", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        table += [f"| {' | '.join(row.cells)} |" for row in rows(section)]
        parts += ["\n".join(table), "\n".join(f"- {line}" for line in lines(section))]
    return "\n\n".join([*parts, EXPLANATION]) + "\n"
