"""A recording for chrome://tracing and ui.perfetto.dev: the Trace Event Format of Chrome, times in microseconds.

A process per rank, a thread per lane, an event per action under its short name, and an arrow from each send to each of
its receives. What ran (kernels, transport, expert map) is in `otherData`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_afd.peers import Peers
from lightning_afd.recording.record import Recording
from lightning_afd.timeline import LANES, Lane, Reduce, Span, Timeline

Event = dict[str, Any]


def write_chrome_trace(recording: Recording, path: str | Path) -> Path:
    """Write `chrome_trace` as a file, the folder of which exists."""
    path = Path(path)
    path.write_text(json.dumps(chrome_trace(recording), separators=(",", ":")))
    return path


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """The object of the JSON file; events stand in the order of time."""
    timeline = recording.timeline
    events = [_event(str(span.action), span, timeline.lane(span)) for span in timeline.spans]
    events += [_event(str(reduce), reduce, "reduce") for reduce in timeline.reduces]
    events += _arrows(recording)
    return {
        "traceEvents": [*_names(timeline), *sorted(events, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
        "otherData": {
            **asdict(recording.versions),
            "global_step": recording.global_step,
            "layout": timeline.layout.describe(),
            "order": recording.order,
            "micro_batches": recording.shape.micro_batches,
            "clock_accuracy_us": max((clock.accuracy for clock in recording.clocks), default=0) * 1e6,
        },
    }


def _names(timeline: Timeline) -> Iterator[Event]:
    """What viewers call ranks and lanes."""
    for rank in range(timeline.layout.world):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": timeline.layout.name_of(rank)}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for number, lane in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}


def _event(name: str, part: Span | Reduce, lane: Lane) -> Event:
    args = (
        {"bytes": part.nbytes}
        if isinstance(part, Reduce)
        else {"layer": part.action.layer, "micro_batch": part.action.micro_batch}
    )
    place = {"pid": part.rank, "tid": LANES.index(lane), "ts": part.start * 1e6, "dur": part.seconds * 1e6}
    return {"ph": "X", "name": name, "cat": lane, **place, "args": args}


def _arrows(recording: Recording) -> Iterator[Event]:
    """Start and end of an arrow per message; the end is no earlier than the start, even where clocks disagree."""
    timeline, number = recording.timeline, 0
    sends = {(s.rank, s.action): s for s in timeline.spans if timeline.sends(s)}
    for rank, spans in timeline.by_rank.items():
        peers = Peers(timeline.layout, recording.shape, rank)
        for span in (span for span in spans if span.action.is_transfer and timeline.waits(span)):
            for send in (sends[sender, span.action] for sender in peers.senders(span.action)):
                number += 1
                arrow = {"cat": "message", "name": str(span.action), "id": number}
                arrives = max(send.start, span.end)
                lane = LANES.index(timeline.lane(send))
                yield {"ph": "s", **arrow, "pid": send.rank, "tid": lane, "ts": send.start * 1e6}
                yield {
                    "ph": "f",
                    "bp": "e",
                    **arrow,
                    "pid": rank,
                    "tid": LANES.index("receive"),
                    "ts": arrives * 1e6,
                }
