"""The panel of timelines: predicted above measured, and by what the prediction was made."""

from __future__ import annotations

from math import inf

from lightning_afd.report import lanes
from lightning_afd.report.markup import bytes_text, element, seconds_text, text
from lightning_afd.report.predict import Prediction, predict
from lightning_afd.report.run import Run


def timelines(run: Run) -> str:
    """Both timelines, and how far they are apart."""
    prediction, measured = predict(run.chosen, run.waits), run.chosen.timeline
    rows = lanes.rows_of(prediction.timeline, measured)
    window = lanes.window_of(rows)
    first = sum(row.timeline is prediction.timeline for row in rows)
    shown, world = len(rows) - first, measured.layout.world
    ranks = f"; {shown} of {world} ranks are drawn" if shown < world else ""
    note = f"{timing_text(prediction, measured.seconds)} Shown: {lanes.caption(window)}{ranks}."
    return element("p", text(note)) + lanes.draw(rows, window, first)


def timing_text(prediction: Prediction, measured: float) -> str:
    """Predicted and measured length, and by what the prediction was made."""
    predicted = prediction.timeline.seconds
    if predicted <= 0:
        return "Nothing took time."
    return (
        f"Predicted {seconds_text(predicted)} (upper rows, one per worker), measured {seconds_text(measured)} (lower "
        f"rows, {measured / predicted - 1:+z.1%}). The prediction is the same schedule, simulated with the measured "
        f"median of each kind of action on its slowest rank, {way_text(prediction)}; packing is no work there."
    )


def way_text(prediction: Prediction) -> str:
    """What was measured of the way of messages."""
    link = prediction.link
    if not prediction.observed:
        return "and messages take no time, as none was waited for before it was sent"
    rate = f"a rate of {bytes_text(link.attention)}/s" if link.attention < inf else "no time per byte"
    latency = "no latency" if not link.latency else f"a latency of {seconds_text(link.latency)}"
    return f"and messages have {latency} and {rate} (measured on {prediction.observed:,} that were waited for)"
