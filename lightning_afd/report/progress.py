"""The panels of how a run went on: losses, learning rates, and the time of each recorded step."""

from __future__ import annotations

from math import isfinite

from lightning_afd.report.charts import Curve, line_chart
from lightning_afd.report.markup import element, legend, seconds_text, table, text
from lightning_afd.report.run import Points, Run, tokens_per_second

COLORS = 6
LISTED = 40
"""Recorded steps in the table at most: the last ones."""


def losses(run: Run) -> str:
    """Curves of everything that is called a loss, and below it of learning rates."""
    rates = {name: points for name, points in run.metrics.items() if name == "lr" or name.startswith("lr-")}
    charts = _chart(loss_curves(run), "optimizer step")
    return charts + (element("h3", "Learning rate") + _chart(rates, "optimizer step") if rates else "")


def loss_curves(run: Run) -> dict[str, Points]:
    """The logger's losses by column; those of the recorded steps where it has none.

    Of a column that is also there as a mean over epochs (`..._epoch`) only the one of steps.
    """
    names = [name for name in run.metrics if "loss" in name.lower()]
    steps = [
        name for name in names if not name.endswith("_epoch") or f"{name.removesuffix('_epoch')}_step" not in names
    ]
    if steps:
        return {name: run.metrics[name] for name in steps}
    recorded = tuple((float(one.global_step), one.loss) for one in run.recordings if isfinite(one.loss))
    return {"loss of the recorded steps": recorded} if recorded else {}


def _chart(curves: dict[str, Points], x_name: str) -> str:
    if not curves:
        return element("p", "No finite value was recorded or logged.")
    lines = [
        Curve(name=name, points=points, color=f"c{index % COLORS}", marks=len(points) <= 30)
        for index, (name, points) in enumerate(curves.items())
    ]
    ends = ((f"key {line.color}", f"{line.name}, last {line.points[-1][1]:.4g}") for line in lines)
    return legend(ends) + line_chart(lines, x_name)


def drift(run: Run) -> str:
    """Length and parts of every recorded step."""
    curve = tuple((float(one.global_step), one.seconds * 1e3) for one in run.recordings)
    chart = line_chart(
        [Curve(name="step", points=curve, marks=True)], "optimizer step (milliseconds per step)", also=[0]
    )
    head = ("step", "seconds", "tokens/s", "against the first", "loss")
    return element("p", text(drift_text(run))) + chart + table(head, step_rows(run)[-LISTED:])


def step_rows(run: Run) -> list[list[str]]:
    """Every recorded step."""
    first = run.recordings[0].seconds
    return [
        [
            str(one.global_step),
            seconds_text(one.seconds),
            f"{tokens_per_second(one):,.0f}",
            f"{one.seconds / first - 1:+z.1%}",
            f"{one.loss:.4f}",
        ]
        for one in run.recordings
    ]


def drift_text(run: Run) -> str:
    """One sentence on how step times changed."""
    if len(run.recordings) < 2:
        return "Only one step was recorded: a smaller trace= shows how step times change."
    first, last = run.recordings[0], run.recordings[-1]
    times = [one.seconds for one in run.recordings]
    change = last.seconds / first.seconds - 1
    return (
        f"Step {last.global_step} took {abs(change):.1%} {'less' if change < 0 else 'more'} time than step "
        f"{first.global_step}; "
        f"the shortest took {seconds_text(min(times))}, the longest {seconds_text(max(times))}."
    )
