"""Predicted and measured seconds of a step: the simulator against real ranks that exchange real messages over gloo.

Computations are sleeps of known length, so that a few cores are enough for four ranks, and a message counts as arrived
after a known latency. Printed is measured / predicted, median and range of all repetitions, for the times that ranks
are told, and ("with delays") for these and what the machine adds: how late sleeps end, and messages that take longer,
as measured just before each repetition.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from lightning_afd.bench.start import free_port
from lightning_afd.load import Link, Load, by_kind
from lightning_afd.placement import Layout
from lightning_afd.rehearsal import Rehearsal
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import build
from lightning_afd.schedule.shape import Schedule, Shape
from lightning_afd.simulate import simulate
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups

CPU = torch.device("cpu")
MILLISECONDS = {"Af": 9, "Ab": 12, "Aw": 7, "Ef": 11, "Eb": 10, "Ew": 12, "Tf": 4, "Tb": 6, "Tw": 2}
ORDERS = ("sequential", "af-pipe", "zero-bubble")


@dataclass(frozen=True)
class Added:
    """What the machine adds, in seconds."""

    sleep: float = 0
    """How late a sleep ends."""
    message: float = 0
    """What a message takes at least."""


def load_of(shape: Shape, options: argparse.Namespace, added: Added) -> Load:
    """What a step costs; `added` is left out of what ranks are told to do."""
    ideal = by_kind(shape, {kind: value * options.scale / 1000 for kind, value in MILLISECONDS.items()})
    whole = {kind: value * options.scale / 1000 for kind, value in MILLISECONDS.items()}

    def seconds(action: Action) -> float:
        undivided = action.phase == "b" and action.op == "A" and not shape.splits(action.layer)
        kind = "Tw" if shape.runs_tail(action) else "Aw"
        return ideal(action) + (whole[kind] if undivided else 0) + added.sleep

    latency = max(options.latency / 1000 + added.sleep, added.message)
    link = Link(attention=1e12, ffn=1e12, latency=latency)
    links: Any = dict.fromkeys("DCHL", link)
    return Load(seconds=seconds, bytes=lambda action: options.bytes, links=links)


def cases(groups: int) -> Iterator[Schedule]:
    for order in ORDERS:
        for micro_batches in (4, 8):
            shape = Shape(layers=4, groups=groups, micro_batches=micro_batches, split_attention=order == "zero-bubble")
            yield build(order, shape)


def measure_added(transport: P2PTransport, options: argparse.Namespace) -> Added:
    """How late sleeps end, and one way of a message that is waited for at once: medians of all ranks."""
    late, ways = [], []
    shape = Shape(layers=1, groups=dist.get_world_size() // 2, micro_batches=1)
    ping = Rehearsal(
        build("sequential", shape),
        Load(
            seconds=lambda action: 0.0,
            bytes=lambda action: options.bytes,
            links=dict.fromkeys("DCHL", Link(attention=1e12, ffn=1e12)),  # type: ignore[arg-type]
        ),
        dist.get_rank(),
        transport,
    )
    for _ in range(30):
        start = time.perf_counter()
        time.sleep(0.01 * options.scale)
        late.append(time.perf_counter() - start - 0.01 * options.scale)
        dist.barrier()
        start = time.perf_counter()
        ping.run()
        ways.append((time.perf_counter() - start) / 4)  # D and C, forward and backward
    medians = transport.all_gather([statistics.median(late), statistics.median(ways)])
    return Added(statistics.median(row[0] for row in medians), max(row[1] for row in medians))


def measure(transport: P2PTransport, rank: Rehearsal) -> float:
    """Seconds of one step, from the first start to the last end of all ranks."""
    dist.barrier()
    spans = rank.run()
    times = transport.all_gather([spans[0].start, max(span.end for span in spans)])
    return max(end for _, end in times) - min(start for start, _ in times)


def work(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = ProcessGroups(Layout(attention=1, ffn=1, groups=world // 2), rank, timedelta(seconds=60))
    groups.warm(CPU)
    transport = P2PTransport(groups, CPU)
    schedules = list(cases(world // 2))
    ranks = [Rehearsal(schedule, load_of(schedule.shape, options, Added()), rank, transport) for schedule in schedules]
    told = [simulate(schedule, load_of(schedule.shape, options, Added())).seconds for schedule in schedules]
    found: list[list[tuple[float, float]]] = [[] for _ in schedules]
    for repetition in range(options.repeat + 1):
        added = measure_added(transport, options)
        for case, schedule in enumerate(schedules):
            measured = measure(transport, ranks[case])
            if repetition:  # the first one asks for buffers
                delayed = simulate(schedule, load_of(schedule.shape, options, added)).seconds
                found[case].append((measured / told[case], measured / delayed))
    if rank == 0:
        for schedule, predicted, ratios in zip(schedules, told, found, strict=True):
            report(schedule, predicted, ratios)
    dist.barrier()
    groups.destroy()
    dist.destroy_process_group()


def report(schedule: Schedule, predicted: float, ratios: list[tuple[float, float]]) -> None:
    plain, delayed = (sorted(part) for part in zip(*ratios, strict=True))
    shape = schedule.shape
    print(  # noqa: T201
        f"p={shape.depth} R={shape.micro_batches} {schedule.order:<11} predicted {predicted * 1e3:6.0f} ms  "
        f"measured / predicted {statistics.median(plain):.3f} ({plain[0]:.3f} to {plain[-1]:.3f}), "
        f"with delays {statistics.median(delayed):.3f} ({delayed[0]:.3f} to {delayed[-1]:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all sleeps")
    parser.add_argument("--latency", type=float, default=4.0, help="ms that each message takes at least")
    parser.add_argument("--bytes", type=int, default=65536, help="of each message")
    options = parser.parse_args()
    for groups in options.groups:
        multiprocessing.spawn(work, (2 * groups, free_port(), options), nprocs=2 * groups)


if __name__ == "__main__":
    main()
