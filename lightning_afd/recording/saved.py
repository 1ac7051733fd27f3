"""A recording as one JSON file: about 15 bytes per action and rank, plus the names of each program once.

`spans` has an object per rank: which of `programs` it executed, and `ns`, two numbers per action: nanoseconds since the
end of the action before, and its length. Programs of ranks with both roles name the worker of each action, as in
`A0:D3f0`. `reduces` has rows (rank, chunk, start ns, length ns, bytes), `traffic` rows (sender, receiver, index of the
channel, messages, bytes), `nics` rows (rank, name, bytes out, bytes in). All else has the names of `Recording`'s
fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_afd.errors import AFDError, RecordingError
from lightning_afd.expert_map import ExpertMap
from lightning_afd.placement import Layout, Worker
from lightning_afd.recording.record import NicTraffic, RankClock, Recording, Traffic, Versions
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import Knobs
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Reduce, Span, Timeline

FORMAT, FORMAT_VERSION = "lightning-afd recording", 1
FOLDER = "trace"
"""Folder of a run that holds its recordings."""
Value = TypeVar("Value")


def file_name(global_step: int) -> str:
    """`step-00000050.json`: names sort by step."""
    return f"step-{global_step:08d}.json"


def recordings_in(run: str | Path) -> list[Path]:
    """The files of all recordings of a run, by step: in `run`/trace."""
    found = {path.stem.removeprefix("step-"): path for path in Path(run, FOLDER).glob("step-*.json")}
    return [found[number] for number in sorted(filter(str.isdigit, found), key=int)]


def save(recording: Recording, folder: str | Path) -> Path:
    """Write a recording into a folder, which is made where it is missing; the file has its name once it is complete."""
    path = Path(folder, file_name(recording.global_step))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(encode(recording), separators=(",", ":"), allow_nan=False))
    os.replace(unfinished, path)
    return path


def load(path: str | Path) -> Recording:
    """Read a recording; raises RecordingError for a file that is damaged, of something else or of another version."""
    try:
        data = json.loads(Path(path).read_text())
    except ValueError as error:
        raise RecordingError(f"{path} is no complete recording: it is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordingError(f"{path} is no recording: its JSON does not say 'format': '{FORMAT}'")
    if data.get("version") != FORMAT_VERSION:
        writer = data.get("versions", {}).get("package", "another version")
        raise RecordingError(
            f"{path} has version {data.get('version')} of the format, and version {FORMAT_VERSION} is read here: "
            f"read it with lightning-afd {writer}, which wrote it, or record the step again"
        )
    try:
        return decode(data)
    except (AFDError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"{path} is a damaged recording: {type(error).__name__}: {error}") from error


def encode(recording: Recording) -> dict[str, Any]:
    """A recording as values of JSON."""
    timeline, channels = recording.timeline, sorted({traffic.channel for traffic in recording.traffic})
    programs: dict[str, int] = {}
    spans = [_row(rank, own, programs) for rank, own in timeline.by_rank.items()]
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "global_step": recording.global_step,
        "unix_seconds": recording.unix_seconds,
        "layout": asdict(timeline.layout),
        "order": recording.order,
        "shape": asdict(recording.shape),
        "knobs": _encode_knobs(recording.knobs),
        "versions": asdict(recording.versions),
        "clocks": [asdict(clock) for clock in recording.clocks],
        "programs": list(programs),
        "spans": spans,
        "reduces": [[r.rank, r.chunk, _ns(r.start), _ns(r.end) - _ns(r.start), r.nbytes] for r in timeline.reduces],
        "channels": channels,
        "traffic": [[t.sender, t.receiver, channels.index(t.channel), t.messages, t.nbytes] for t in recording.traffic],
        "expert_maps": _encode_maps(recording.expert_maps),
        "tokens_per_expert": recording.tokens_per_expert,
        "loss": recording.loss if math.isfinite(recording.loss) else str(recording.loss),
        "tokens": recording.tokens,
        "seconds": recording.seconds,
        "nics": [[nic.rank, nic.name, nic.out, nic.into] for nic in recording.nics],
    }


def decode(data: Mapping[str, Any]) -> Recording:
    """The recording of `encode`."""
    layout, channels = _build(Layout, data["layout"]), data["channels"]
    programs = [[_parse(name) for name in program.split()] for program in data["programs"]]
    spans = [span for row in data["spans"] for span in _spans(row, programs)]
    reduces = [
        Reduce(chunk, rank, start / 1e9, (start + length) / 1e9, nbytes)
        for rank, chunk, start, length, nbytes in data["reduces"]
    ]
    recording = Recording(
        global_step=data["global_step"],
        unix_seconds=data["unix_seconds"],
        timeline=Timeline(layout, tuple(spans), tuple(reduces)),
        order=data["order"],
        shape=_build(Shape, data["shape"]),
        knobs=Knobs(**{**data["knobs"], "pace": Pace(**data["knobs"]["pace"])}),
        versions=_build(Versions, data["versions"]),
        clocks=tuple(_build(RankClock, clock) for clock in data["clocks"]),
        traffic=tuple(Traffic(s, r, channels[c], messages, nbytes) for s, r, c, messages, nbytes in data["traffic"]),
        expert_maps=_decode_maps(data["expert_maps"]),
        tokens_per_expert=tuple(map(tuple, data["tokens_per_expert"])),
        loss=float(data["loss"]),
        tokens=data["tokens"],
        seconds=data["seconds"],
        nics=tuple(NicTraffic(*row) for row in data.get("nics", ())),
    )
    _check(recording)
    return recording


def _check(recording: Recording) -> None:
    """Raise ValueError where parts do not fit together."""
    layout = recording.timeline.layout
    ranks = {part.rank for part in recording.timeline.parts}
    ranks |= {rank for traffic in recording.traffic for rank in (traffic.sender, traffic.receiver)}
    if not ranks <= set(range(layout.world)) or len(recording.clocks) != layout.world:
        raise ValueError(f"{layout.describe()} has {layout.world} ranks, not {sorted(ranks)}")
    recording.tokens_per_rank()


def _row(rank: int, spans: Sequence[Span], programs: dict[str, int]) -> dict[str, Any]:
    program = " ".join(str(span.action if span.worker is None else Step(span.worker, span.action)) for span in spans)
    numbers, before = [], 0
    for span in spans:
        start, end = _ns(span.start), _ns(span.end)
        numbers += [start - before, end - start]
        before = end
    return {"rank": rank, "program": programs.setdefault(program, len(programs)), "ns": numbers}


def _parse(name: str) -> tuple[Action, Worker | None]:
    """An action, and the worker where it is named."""
    if ":" not in name:
        return Action.parse(name), None
    step = Step.parse(name)
    return step.action, step.worker


def _spans(row: Mapping[str, Any], programs: Sequence[Sequence[tuple[Action, Worker | None]]]) -> Iterator[Span]:
    now, numbers = 0, row["ns"]
    for (action, worker), gap, length in zip(programs[row["program"]], numbers[::2], numbers[1::2], strict=True):
        start = now + gap
        now = start + length
        yield Span(action, row["rank"], start / 1e9, now / 1e9, worker)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _encode_knobs(knobs: Knobs) -> dict[str, Any]:
    own = {field.name: getattr(knobs, field.name) for field in fields(knobs)}
    return own | {"pace": {"seconds": dict(knobs.pace.seconds), "transfer": knobs.pace.transfer}}


def _encode_maps(maps: Sequence[ExpertMap]) -> dict[str, Any]:
    """Layers mostly have the same map, so each is written once."""
    unique = list(dict.fromkeys(maps))
    return {"maps": [asdict(one) for one in unique], "of_layer": [unique.index(one) for one in maps]}


def _decode_maps(data: Mapping[str, Any]) -> tuple[ExpertMap, ...]:
    maps = [_build(ExpertMap, one) for one in data["maps"]]
    return tuple(maps[index] for index in data["of_layer"])


def _build(kind: type[Value], data: Mapping[str, Any]) -> Value:
    """A value from its fields; JSON has lists where it has tuples."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
