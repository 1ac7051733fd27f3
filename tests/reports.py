"""A run's folder with simulated recordings whose traffic is that of their messages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from recorded import SECONDS, recorded

from lightning_afd.expert_map import ExpertMap
from lightning_afd.load import Link, Load, by_kind
from lightning_afd.recording import Recording, Traffic, save
from lightning_afd.report.run import Run
from lightning_afd.schedule.orders import build
from lightning_afd.schedule.shape import Shape
from lightning_afd.simulate import simulate
from lightning_afd.timeline import Timeline

LINK = Link(attention=1e9, ffn=1e9, latency=2e-4)
BYTES = {"Df": 4e5, "Db": 2e5, "Cf": 2e5, "Cb": 3e5, "Hf": 1e5, "Hb": 1e5, "Lf": 1e4, "Lb": 1e4}
METRICS = "epoch,lr-AdamW,step,train_loss,val_loss\n0,0.001,9,2.5,\n0,0.002,19,2.25,\n0,,19,,2.75\n0,0.003,29,nan,\n"


def step_of(shape: Shape, order: str = "af-pipe", **changes: Any) -> Recording:
    """A simulated step on LINK with one rank per worker."""
    load = Load(
        seconds=by_kind(shape, SECONDS),
        bytes=lambda action: BYTES[action.op + action.phase],
        links=dict.fromkeys("DCHL", LINK),
    )
    timeline = simulate(build(order, shape), load).timeline
    fields = {"order": order, "traffic": traffic_of(timeline, shape), **experts_of(shape)}
    return recorded(timeline, shape, **{**fields, **changes})


def experts_of(shape: Shape) -> dict[str, Any]:
    """Four experts per layer on F rank 0; the last one never gets a token."""
    return {
        "expert_maps": (ExpertMap((0, 0, 0, 0)),) * shape.layers,
        "tokens_per_expert": ((10, 20, 30, 0),) * shape.layers,
    }


def traffic_of(timeline: Timeline, shape: Shape) -> tuple[Traffic, ...]:
    """What every message of BYTES adds up to."""
    messages: Counter[tuple[int, int, str]] = Counter()
    for action in {span.action for span in timeline.spans if span.action.is_transfer}:
        sender, receiver = (timeline.layout.ranks_of(worker)[0] for worker in shape.endpoints(action))
        messages[sender, receiver, action.op + action.phase] += 1
    return tuple(
        Traffic(sender, receiver, channel, count, round(count * BYTES[channel]))
        for (sender, receiver, channel), count in messages.items()
    )


def run_of(*recordings: Recording, **changes: Any) -> Run:
    """A run that is in memory only; the last recording is shown."""
    fields: dict[str, Any] = {
        "name": "run",
        "recordings": recordings,
        "recorded": len(recordings),
        "chosen": recordings[-1],
        "metrics": {},
        "model": "",
    }
    return Run(**{**fields, **changes})


def run_folder(folder: Path, steps: tuple[int, ...] = (10, 20, 30)) -> Path:
    """A run of two groups that got slower, with metrics and settings; the median step is the middle one."""
    shape = Shape(layers=4, groups=2, micro_batches=6, router_logits=True)
    for index, step in enumerate(steps):
        save(step_of(shape, global_step=step, seconds=0.2 + 0.05 * index, loss=3.0 - index), folder / "logs" / "trace")
    (folder / "logs" / "metrics.csv").write_text(METRICS)
    (folder / "config.yaml").write_text("model:\n  config:\n    model_type: qwen3_moe\n")
    return folder
