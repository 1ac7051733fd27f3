"""Draw the pictures of docs/method.md: `python docs/draw_method.py`.

Each shows a schedule as the simulator runs it, drawn like any other timeline. Costs are made up so that a picture can
be read: of one micro-batch, in milliseconds. A picture carries the digest of what it shows, by which a test finds old
ones.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lightning_afd.draw import Part, draw_timeline
from lightning_afd.load import Chunks, Link, Load, by_kind, collocated
from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.orders import build
from lightning_afd.schedule.shape import Shape
from lightning_afd.schedule.together import build_together
from lightning_afd.simulate import Simulation, simulate
from lightning_afd.timeline import Span, Timeline

FOLDER = Path(__file__).resolve().parent / "pictures"
KEY = "timeline"
"""Name of the digest among the texts of a picture."""

APART = {"Af": 3.0, "Ab": 6.0, "Ef": 3.0, "Eb": 3.0, "Ew": 3.0, "Tf": 1.0, "Tb": 1.0}
"""One attention rank and one FFN rank of equal work; the backward is twice the forward."""
SPLIT = APART | {"Ab": 3.0, "Aw": 3.0, "Tb": 0.5, "Tw": 0.5}
"""The same where attention ranks divide their backward."""
TRANSFER, HOP = 2.0, 1.0
"""A dispatch or combine with all copies of a token, and a hop with one."""
STAYS = 3 / 8
"""What a rank of two collocated ones sends of a dispatch between separate ones: it has half of the rows, and with top-2
routing three of four tokens have an expert on the other rank."""
REDUCE, CHUNK = 4.0, 1.0
"""The sum of the dense gradients of a segment, and a chunk of it."""
LINK = Link(attention=1, ffn=1)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One schedule and what became of it."""

    name: str
    title: str
    load: Load
    simulation: Simulation
    is_collocated: bool = False

    @property
    def timeline(self) -> Timeline:
        """One row per rank."""
        return on_one_rank(self.simulation.timeline) if self.is_collocated else self.simulation.timeline

    @property
    def ways(self) -> dict[str, list[Part]]:
        """What each rank sends, chunks of gradients included."""
        found: dict[str, list[Part]] = {}
        for carried in self.simulation.transfers:
            sender = "the rank" if self.is_collocated else str(carried.worker)
            found.setdefault(f"{sender}\nsends", []).append(
                Span(carried.action, 0, carried.start, carried.start + self.load.bytes(carried.action) / LINK.attention)
            )
        if self.is_collocated:
            found["the rank\nsends"] += self.simulation.timeline.reduces
        return dict(sorted(found.items()))

    def text(self) -> str:
        """All that the picture shows, in milliseconds."""
        timeline = self.timeline
        rows: dict[str, list[Part]] = {
            timeline.layout.name_of(rank): list(own) for rank, own in timeline.by_rank.items()
        }
        lines = (f"{name}: {' '.join(map(_described, parts))}" for name, parts in (rows | self.ways).items())
        return "\n".join((self.title, *lines))

    def digest(self) -> str:
        """By which an old picture is known."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def draw(self, folder: Path) -> None:
        """Write the picture with few colours, as it has few."""
        drawn = io.BytesIO()
        draw_timeline(self.timeline, drawn, self.title, self.ways)
        told = PngInfo()
        told.add_text(KEY, self.digest())
        with Image.open(drawn) as image:
            image.convert("RGB").quantize(64).save(folder / f"{self.name}.png", pnginfo=told, optimize=True)


def _described(part: Part) -> str:
    name = str(part.action) if isinstance(part, Span) else str(part)
    return f"{name} {part.start * 1e3:.3f}-{part.end * 1e3:.3f}"


def on_one_rank(timeline: Timeline) -> Timeline:
    """Both roles of a collocated rank as one row: it waits where it computes nothing, for what comes next."""
    ordered = sorted(timeline.spans, key=lambda span: (span.start, span.end))
    waits, computed = (
        [replace(span, rank=0, worker=timeline.worker(span)) for span in ordered if timeline.lane(span) == lane]
        for lane in ("receive", "compute")
    )
    spans = computed[:1]
    for before, after in pairwise(computed):
        if after.start > before.end:
            came = max((span for span in waits if span.end <= after.start), key=_end)
            spans.append(replace(came, start=before.end, end=after.start))
        spans.append(after)
    return Timeline(Layout.together(1), tuple(spans), tuple(replace(reduce, rank=0) for reduce in timeline.reduces))


def _end(span: Span) -> float:
    return span.end


def load(shape: Shape, costs: Mapping[str, float], transfer: float = TRANSFER) -> Load:
    """Costs of a step out of milliseconds."""
    seconds = by_kind(shape, costs)
    return Load(
        seconds=lambda action: seconds(action) * 1e-3,
        bytes=lambda action: (HOP if action.op in "HL" else transfer) * 1e-3,
        links=dict.fromkeys("DCHL", LINK),
    )


def apart(name: str, order: str, shape: Shape) -> Picture:
    """A step of separate ranks."""
    costs = load(shape, SPLIT if shape.split_attention else APART)
    layout = Layout(attention=1, ffn=1, groups=shape.groups)
    title = f"order {order}: {layout.describe()}, {_sizes(shape)} (simulated)"
    return Picture(name=name, title=title, load=costs, simulation=simulate(build(order, shape), costs))


def together(name: str, order: str, micro_batches: int, *, chunks: bool = False) -> Picture:
    """A step of one of two ranks, each with half the attention and half the experts of the same global batch."""
    shape = Shape(layers=2, micro_batches=micro_batches)
    part = 4 / micro_batches
    costs = load(shape, {kind: value / 2 * part for kind, value in APART.items()}, TRANSFER * STAYS * part)
    costs = replace(costs, machine=collocated)
    if chunks:
        costs = replace(costs, reduce=_reduced, chunks=Chunks(link=LINK, longest=CHUNK * 1e-3))
    title = f"order {order}: one of two collocated ranks, {_sizes(shape)}{', sums in chunks of 1 ms' if chunks else ''}"
    simulation = simulate(build_together(order, shape).schedule, costs)
    return Picture(name=name, title=f"{title} (simulated)", load=costs, simulation=simulation, is_collocated=True)


def _reduced(worker: Worker, segment: int) -> float:
    """Of a segment's dense gradients; those of the experts need no sum."""
    return REDUCE * 1e-3 if worker.role == "A" and segment < 2 else 0.0


def pictures() -> Iterator[Picture]:
    """All of them, in the order of the page."""
    yield apart("one_micro_batch", "sequential", Shape(layers=2, micro_batches=1))
    for name, order in (("sequential", "sequential"), ("layer_major", "layer-major"), ("af_pipe", "af-pipe")):
        yield apart(name, order, Shape(layers=2, micro_batches=4))
    yield apart("groups", "af-pipe", Shape(layers=4, groups=2, micro_batches=6))
    yield apart("zero_bubble", "zero-bubble", Shape(layers=4, groups=2, micro_batches=6, split_attention=True))
    yield together("ep", "sequential", 1)
    yield together("experts_only", "experts-only", 4)
    yield together("flowmoe", "flowmoe", 4)
    yield together("flowmoe_chunks", "flowmoe", 4, chunks=True)


def _sizes(shape: Shape) -> str:
    return f"{shape.layers} MoE layers, {shape.micro_batches} micro-batch" + ("es" if shape.micro_batches > 1 else "")


def table(drawn: Mapping[str, Picture]) -> str:
    """Steps of the pictures beside one another, as Markdown."""
    lines = [
        "| picture | step, ms | share that the busiest rank computes | share that rank 0 waits |",
        "|---|---|---|---|",
    ]
    for name, picture in drawn.items():
        busy = max(seconds for (_, link, way), seconds in picture.simulation.busy.items() if way == "compute")
        step, waits = picture.simulation.seconds, picture.timeline.exposed(0)
        lines.append(f"| [{name}](pictures/{name}.png) | {step * 1e3:.4g} | {busy / step:.0%} | {waits:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Draw all, and put their table between its marks in method.md."""
    FOLDER.mkdir(exist_ok=True)
    drawn = {picture.name: picture for picture in pictures()}
    for picture in drawn.values():
        picture.draw(FOLDER)
    page = FOLDER.parent / "method.md"
    page.write_text(with_table(page.read_text(), table(drawn)))


BEGIN, END = "<!-- steps: written by docs/draw_method.py -->\n", "<!-- end of steps -->"


def with_table(page: str, rows: str) -> str:
    """A page with these rows between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


if __name__ == "__main__":
    main()
