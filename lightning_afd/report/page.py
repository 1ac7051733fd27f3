"""The page around the panels: one file without any other, readable in light and dark."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from lightning_afd.report.experts import experts
from lightning_afd.report.lanes import colors
from lightning_afd.report.markup import element, text
from lightning_afd.report.progress import drift, losses
from lightning_afd.report.run import Run, read_run, recordings_of
from lightning_afd.report.shares import shares, waits
from lightning_afd.report.summary import summary
from lightning_afd.report.timelines import timelines
from lightning_afd.report.traffic import traffic

REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One part of the page."""

    key: str
    """Its id, and the last part of its address."""
    title: str
    how: str
    """One sentence: how to read it."""
    body: Callable[[Run], str]


PANELS = (
    Panel(
        key="summary",
        title="Summary",
        how="The first line names what bounds a step, by the largest share of it, and what to change first.",
        body=summary,
    ),
    Panel(
        key="timelines",
        title="Predicted and measured timeline",
        how="Each row is a worker or a rank, time goes right, and grey is waiting: where the lower rows have grey that "
        "the upper ones have not, the job loses time for a reason other than its schedule.",
        body=timelines,
    ),
    Panel(
        key="shares",
        title="How ranks spend the step",
        how="A full bar is the whole step: busy is computation and sending, exposed is waiting for messages that no "
        "computation hides, and a bubble is time in which a rank neither works nor waits for a message.",
        body=shares,
    ),
    Panel(
        key="waits",
        title="What is waited for",
        how="wait_for_A and wait_for_F last until the slowest sender sends, wait_for_net from then on: a P99 far above "
        "P50 means that single messages are late, not all of them.",
        body=waits,
    ),
    Panel(
        key="traffic",
        title="Bytes per link and direction",
        how="Rows send and columns receive, in one step and headers included: uneven cells of one kind are experts "
        "that get uneven numbers of tokens.",
        body=traffic,
    ),
    Panel(
        key="experts",
        title="Tokens per expert and F rank",
        how="Every row is a layer and darker means more tokens than the row's mean; a dark column below one F rank is "
        "the rank that all others wait for.",
        body=experts,
    ),
    Panel(
        key="loss",
        title="Loss",
        how="Each line is one logged value over optimizer steps: the training loss is that of the global batch.",
        body=losses,
    ),
    Panel(
        key="drift",
        title="Recorded steps",
        how="Every dot is a recorded step: a line that rises means that the job becomes slower while it runs.",
        body=drift,
    ),
)


def has_recordings(run: str | Path) -> bool:
    """Whether a run has anything to report."""
    return bool(recordings_of(Path(run)))


def write_report(run: str | Path, out: str | Path | None = None, step: int | None = None) -> Path:
    """Write the report of a run's folder, by default as report.html in it, and return its path.

    `step` is the recorded step that is shown in detail, by default the one of median length. Raises RecordingError for
    a folder without recorded steps and for damaged files.
    """
    path = Path(run, REPORT) if out is None else Path(out)
    content = page(read_run(run, step))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(content, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def page(run: Run) -> str:
    """The whole page."""
    title = text(f"{run.name}: step {run.chosen.global_step}")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_file('style.css')}\n{colors()}</style>"
    )
    body = element("h1", title) + _contents() + "".join(section(panel, run) for panel in PANELS)
    script = f"<script>{_file('zoom.js')}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{script}</body></html>\n'


def section(panel: Panel, run: Run) -> str:
    """One panel with its title and its sentence."""
    how = element("p", element("b", "How to read this:") + " " + text(panel.how), class_="how")
    body = element("div", panel.body(run), class_="body")
    return element("section", element("h2", text(panel.title)) + how + body, id=panel.key, class_="panel")


def _contents() -> str:
    return element("nav", " · ".join(element("a", text(panel.title), href=f"#{panel.key}") for panel in PANELS))


def _file(name: str) -> str:
    return files("lightning_afd.report").joinpath(name).read_text(encoding="utf-8").strip()
