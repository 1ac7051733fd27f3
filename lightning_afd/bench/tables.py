"""A result for people: tables of rich, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from lightning_afd.bench.ratios import Spread
from lightning_afd.bench.result import SAME_LOSS, Measured, Probe, Result, Section

IN_FULL = 4
"""Sections that are shown in full; more of them become the rows of one table."""
PACKING = ("Cb", "Cf", "Db", "Df")
"""Stages that are too short for a table of many sections; the JSON has them."""
TEXTS = ("contender", "plan", "bound by", "stage", "section", "link", "kind", "rank")
EXPLANATION = (
    "Medians, and quartiles in brackets. x first: paired ratios of the step to that of the first contender. x its "
    "bound: step over max(computation alone, bytes / link rate), measured in the same repetition. MB: bytes of a step "
    "in the busiest direction of a rank. waits, bubble: shares of the step in which ranks wait for messages, or are "
    "idle. engine: the engine's own work over the step, on the busier role. memory: MB by which a rank grows "
    "at most during a step."
)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table in words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"{self.title}: a row has another number of cells than {len(self.columns)} columns")

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left", title_style="bold", pad_edge=False)
        for column in self.columns:
            table.add_column(column, justify="left" if column in TEXTS else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a document."""
        lines = [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"| {' | '.join(row)} |" for row in self.rows)])


def parts(result: Result) -> Iterator[Grid | str]:
    """Everything that is shown, in order."""
    if result.probes:
        yield links(result.probes)
    if not result.sections:
        return
    if len(result.sections) > IN_FULL:
        yield overview(result.sections)
        yield tails(result.sections)
        yield memories(result.sections)
        yield from together(result.sections)
    else:
        for section in result.sections:
            yield contenders(section)
            yield from lines(section)
            yield stages(f"{section.measured[0].name}: ms per action or wait", section.measured[0].stages)
    yield operators(result.sections)
    yield EXPLANATION
    for section in result.sections:
        yield section.summary


def contenders(section: Section) -> Grid:
    """How long they take, and why."""
    columns = (
        "contender",
        "plan",
        "step, s",
        "x first",
        "x its bound",
        "bound by",
        "MB",
        "loss",
        "waits",
        "bubble",
        "engine",
        "memory",
    )
    rows = tuple(
        (
            one.name,
            one.plan,
            f"{Spread.of(one.seconds):.3f}",
            f"{section.ratio(one.name):.2f}",
            f"{one.over_bound:.2f}" if one.over_bound else "-",
            one.bound_by or "-",
            f"{one.step_bytes / 1e6:.1f}" if one.step_bytes else "-",
            f"{one.losses[-1]:.5f}",
            _share(one, "exposed"),
            _share(one, "bubble"),
            f"{max(one.overhead.values()):.1%}" if one.overhead else "-",
            _memory(one),
        )
        for one in section.measured
    )
    return Grid(title=heading(section), columns=columns, rows=rows)


def overview(sections: Sequence[Section]) -> Grid:
    """A row per section: the step of the first contender, and how many times as long the others take."""
    names = list(dict.fromkeys(one.name for section in sections for one in section.measured))
    first = names[0]
    rows = []
    for section in sections:
        bound = section.measured[0].over_bound
        by_name = {one.name for one in section.measured}
        cells = [f"{section.ratio(name):.2f}" if name in by_name else "-" for name in names[1:]]
        step = f"{Spread.of(section.measured[0].seconds):.3f}"
        rows.append(
            (section.title, step, f"{bound.median:.2f}" if bound else "-", section.measured[0].bound_by, *cells)
        )
    columns = (
        "section",
        f"{first}, s",
        "x its bound",
        "bound by",
        *(f"{name} / {first}" for name in names[1:]),
    )
    return Grid(title=f"Steps of {first}, and how many times as long others take", columns=columns, rows=tuple(rows))


def tails(sections: Sequence[Section]) -> Grid:
    """A row per section: how the first contender's actions and waits spread, and what they take of its step."""
    kinds = sorted({kind for section in sections for kind in section.measured[0].stages if kind not in PACKING})
    rows = []
    for section in sections:
        one = section.measured[0]
        spreads = (_quantiles(one.stages[kind]) if kind in one.stages else "-" for kind in kinds)
        rows.append((section.title, _share(one, "exposed"), _share(one, "bubble"), *spreads))
    title = f"Stages of {sections[0].measured[0].name}: P50 / P95 / P99 in ms, and its waits and bubbles"
    return Grid(title=title, columns=("section", "waits", "bubble", *kinds), rows=tuple(rows))


def _quantiles(figures: Mapping[str, float]) -> str:
    return " / ".join(f"{figures[p] * 1e3:.1f}" for p in ("p50", "p95", "p99"))


def memories(sections: Sequence[Section]) -> Grid:
    """A row per section: MB by which ranks grow at most during a step."""
    names = list(dict.fromkeys(one.name for section in sections for one in section.measured))
    rows = []
    for section in sections:
        by_name = {one.name: _memory(one) for one in section.measured}
        rows.append((section.title, *(by_name.get(name, "-") for name in names)))
    return Grid(title="Memory of ranks, MB", columns=("section", *names), rows=tuple(rows))


def _memory(one: Measured) -> str:
    """By rank."""
    return " / ".join(f"{nbytes / 1e6:.1f}" for nbytes in one.memory.values()) or "-"


def _share(one: Measured, part: str) -> str:
    """Of the step, on the average of the ranks."""
    shares = [usage[part] for usage in one.usage.values()]
    return f"{sum(shares) / len(shares):.0%}" if shares else "-"


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
    if section.rate_problem:
        yield section.rate_problem
    if section.foreign_cpu:
        yield f"CPU time of others per repetition: {Spread.of(section.foreign_cpu):.2f} s"
    if section.measured[0].advice:
        yield f"{section.measured[0].name}: {section.measured[0].advice}"
    yield from section.notes


def together(sections: Sequence[Section]) -> Iterator[str]:
    """What `lines` says of one section, of many at once."""
    worst = max(sections, key=lambda section: section.disagreement)
    verdict = "agree" if worst.disagreement <= SAME_LOSS else f"DO NOT AGREE in {worst.title}"
    if any(len(section.measured) > 1 for section in sections):
        yield f"losses {verdict} (largest relative difference {worst.disagreement:.1e})"
    yield from (f"{section.title}: {section.rate_problem}" for section in sections if section.rate_problem)
    foreign = [seconds for section in sections for seconds in section.foreign_cpu]
    if foreign:
        yield f"CPU time of others per repetition: {Spread.of(foreign):.2f} s"
    yield from dict.fromkeys(note for section in sections for note in section.notes)


def stages(title: str, kinds: Mapping[str, Mapping[str, float]]) -> Grid:
    """How long actions and waits take."""
    rows = tuple(
        (kind, str(int(figures["count"])), *(f"{figures[p] * 1e3:.2f}" for p in ("p50", "p95", "p99")))
        for kind, figures in sorted(kinds.items())
    )
    return Grid(title=title, columns=("stage", "count", "P50", "P95", "P99"), rows=rows)


def operators(sections: Sequence[Section]) -> Grid:
    """Kinds of actions without communication, per section and role."""
    kinds = sorted({kind for section in sections for one in section.operators.values() for kind in one})
    rows = tuple(
        (section.title, role, *(f"{found[kind]['p50'] * 1e3:.2f}" if kind in found else "-" for kind in kinds))
        for section in sections
        for role, found in section.operators.items()
    )
    title = "Operators without communication, P50 in ms (A attention, E experts, T tail, D and C packing)"
    return Grid(title=title, columns=("section", "rank", *kinds), rows=rows)


def links(found: Sequence[Probe]) -> Grid:
    """Latency and bandwidth against message size."""
    rows = tuple(
        (
            probe.rate,
            probe.kind,
            f"{probe.nbytes / 1024:.0f}",
            *(f"{probe.seconds[p] * 1e3:.2f}" for p in ("p50", "p95", "p99")),
            f"{probe.bandwidth * 8 / 1e9:.3f}",
        )
        for probe in found
    )
    columns = ("link", "kind", "KiB", "P50, ms", "P95, ms", "P99, ms", "many: Gbit/s")
    return Grid(title="Messages over single links", columns=columns, rows=rows)


def markdown(result: Result) -> str:
    """All of it, with command and machine."""
    machine = result.machine
    what = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    command = (
        f"`{result.command}` on {machine['ranks']} ranks, {what}, torch {machine['torch']}, load {machine['load']}."
    )
    texts = [part.markdown() if isinstance(part, Grid) else f"- {part}" for part in parts(result)]
    return "\n\n".join([command, *texts]).replace("\n\n- ", "\n- ") + "\n"
