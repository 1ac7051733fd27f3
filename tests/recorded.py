"""Small recordings: spans from text, and a whole step from the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_afd.expert_map import ExpertMap
from lightning_afd.load import Link, Load, by_kind
from lightning_afd.placement import Layout
from lightning_afd.recording import RankClock, Recording, Traffic, Versions
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import DEFAULTS, build
from lightning_afd.schedule.shape import Shape
from lightning_afd.simulate import simulate
from lightning_afd.timeline import Reduce, Span, Timeline

SECONDS = {"Af": 0.003, "Ab": 0.006, "Aw": 0.003, "Ef": 0.002, "Eb": 0.002, "Ew": 0.002, "Tf": 0.001, "Tb": 0.001}
VERSIONS = Versions(package="0", torch="2", device="cpu", experts="loop", transport="gloo", expert_map=3)


def spans(text: str, rank: int = 0) -> list[Span]:
    """`A0f0 1-3, C0f0 3-4`: actions with start and end in seconds."""
    found = []
    for part in text.split(", "):
        name, times = part.split()
        start, end = map(float, times.split("-"))
        found.append(Span(Action.parse(name), rank, start, end))
    return found


def simulated(shape: Shape, order: str = "af-pipe", nbytes: float = 1e6) -> Timeline:
    """A step on links of 1 GB/s, in whole nanoseconds, with a reduce behind the last action of rank 0."""
    link = Link(attention=1e9, ffn=1e9, latency=1e-4)
    load = Load(seconds=by_kind(shape, SECONDS), bytes=lambda action: nbytes, links=dict.fromkeys("DCXYHL", link))
    timeline = simulate(build(order, shape), load).timeline
    exact = (replace(span, start=_round(span.start), end=_round(span.end)) for span in timeline.spans)
    end = _round(timeline.end)
    return replace(timeline, spans=tuple(exact), reduces=(Reduce(0, 0, end, _round(end + 0.004), 4096),))


def _round(seconds: float) -> float:
    return round(seconds * 1e9) / 1e9


def recorded(timeline: Timeline | None = None, shape: Shape | None = None, **changes: Any) -> Recording:
    """A recording of a timeline, by default of a simulated step of 1A + 1F with two layers of three experts."""
    shape = shape or Shape(layers=2, micro_batches=3)
    timeline = timeline or simulated(shape)
    layout: Layout = timeline.layout
    fields: dict[str, Any] = {
        "global_step": 50,
        "unix_seconds": 1.7e9,
        "timeline": timeline,
        "order": "af-pipe",
        "shape": shape,
        "knobs": DEFAULTS,
        "versions": VERSIONS,
        "clocks": tuple(RankClock(offset=-0.25 * rank) for rank in range(layout.world)),
        "traffic": (Traffic(0, layout.world - 1, "Df", 6, 4096), Traffic(layout.world - 1, 0, "Cf", 6, 2048)),
        "expert_maps": (ExpertMap.contiguous(3, layout.ffn),) * shape.layers,
        "tokens_per_expert": ((5, 0, 7),) * shape.layers,
        "loss": 1.5,
        "tokens": 12,
        "seconds": 0.2,
    }
    return Recording(**{**fields, **changes})
