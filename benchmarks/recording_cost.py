"""Share of a training step that recording it takes: measuring, gathering, joining, figures, and the file.

All ranks of a layout run in this process, so what each of them does counts, one after another; steps with and without a
recording alternate, and so does which one comes first. Reported are medians with quartiles of the ratio within pairs of
neighbouring steps, in CPU time and by the clock on the wall, and the CPU time of what a recorded step does besides. The
model is that of the default recipe. In one process an exchange costs nothing; `--exchange` measures it alone, between
two processes over gloo.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import Batches, LocalJob
from lightning_afd.recording import save
from lightning_afd.recording.gather import Part
from lightning_afd.strategies.driver import StepStats
from lightning_afd.strategies.tracing import Tracer, mean_shares
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups

Times = tuple[float, float]
"""Seconds of this process on the CPU, and by the clock on the wall."""


def make_model() -> nn.Module:
    """That of conf/model/qwen3_moe_tiny.yaml, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=1024,
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


class RecordedJob:
    """A job in one process whose steps can be recorded."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        layout = Layout(attention=options.attention, ffn=options.ffn)
        self.job = LocalJob(make_model(), layout, loss=lambda model, ids: model(ids, labels=ids).loss)
        self.batches: Batches = [
            [torch.randint(0, 1024, (options.rows, 128)) for _ in range(4)] for _ in range(options.attention)
        ]
        self.folder = folder
        self.tracers = [Tracer(engine, 1, "local") for engine in self.job.engines]
        self.stats = StepStats(loss=1.0, tokens=1.0, seconds=1.0, exposed=0.0)
        self.number = 0

    def step(self, *, recorded: bool) -> Times:
        """One step of all ranks."""
        self.number += 1
        return timed(lambda: self._step(self.number if recorded else 0))

    def _step(self, number: int) -> None:
        for tracer in self.tracers:
            tracer.begin(number)
        self.job.step(self.batches)
        for tracer in self.tracers:
            tracer.end_batch()
        finishes = [lambda t=tracer: t.finish(self.stats, lambda: self.folder) for tracer in self.tracers]
        self.job.network.run(finishes)  # type: ignore[arg-type]

    def pair(self) -> tuple[Times, Times]:
        """A step without and one with a recording."""
        if self.number % 4:
            with_it = self.step(recorded=True)
            return self.step(recorded=False), with_it
        return self.step(recorded=False), self.step(recorded=True)

    def parts(self) -> dict[str, Callable[[], Any]]:
        """What a recorded step does besides, behind a step."""
        rank_0 = self.tracers[0]
        parts = [tracer._part() for tracer in self.tracers]
        recording = rank_0._join(parts, self.stats)
        return {
            "reading what ranks have measured": lambda: [tracer._part() for tracer in self.tracers],
            "joining it": lambda: rank_0._join(parts, self.stats),
            "figures": lambda: mean_shares(recording),
            "writing the file": lambda: save(recording, self.folder),
        }


def timed(function: Callable[[], Any]) -> Times:
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


def spread(values: Sequence[float], unit: str) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f}){unit}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2, help="of 128 tokens, per micro-batch (four per A rank)")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--exchange", action="store_true", help="measure the exchange between processes instead")
    return parser.parse_args()


def exchange(rank: int, folder: str, repetitions: int = 200) -> None:
    """What two ranks with 108 actions each say to one another behind a recorded step."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    transport = P2PTransport(ProcessGroups(Layout(attention=1, ffn=1), rank, timedelta(minutes=5)), torch.device("cpu"))
    part = Part(
        times=array("d", range(216)),
        reduces=((0.0, 1.0, 2),) * 2,
        sent={(channel, 1 - rank): (16, 100000) for channel in ("Df", "Cf")},
        tokens_per_expert=((100,) * 8,) * 4,
        kernels=frozenset({"loop"}),
        host="this one",
        source="perf_counter",
    )

    def talk() -> None:
        transport.gather_object(part)
        transport.all_gather([0.0] * 4)

    times = [timed(talk) for _ in range(repetitions)][10:]
    if rank == 0:
        cpu, wall = ([time[index] * 1e3 for time in times] for index in (0, 1))
        print(f"exchange of rank 0: CPU time {spread(cpu, ' ms')}, wall {spread(wall, ' ms')}")  # noqa: T201
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.exchange:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(exchange, args=(folder,), nprocs=2)
        return
    with tempfile.TemporaryDirectory() as folder:
        job = RecordedJob(options, Path(folder))
        job.pair()
        pairs = [job.pair() for _ in range(options.pairs)]
        report(job, pairs)


def report(job: RecordedJob, pairs: Sequence[tuple[Times, Times]]) -> None:
    actions = sum(len(engine.runtime.spans) for engine in job.job.engines)
    print(f"{actions} actions of all ranks together, {len(pairs)} pairs of steps")  # noqa: T201
    for index, clock in enumerate(("CPU time", "wall")):
        step = spread([without[index] * 1e3 for without, _ in pairs], " ms")
        ratio = spread([with_it[index] / without[index] for without, with_it in pairs], "")
        print(f"{clock}: a step {step}; with a recording over without one {ratio}")  # noqa: T201
    for name, part in job.parts().items():
        cpu = [timed(part)[0] * 1e3 for _ in range(21)]
        print(f"  {name}: {spread(cpu, ' ms')}, {statistics.median(cpu) * 1e3 / actions:.1f} us per action")  # noqa: T201


if __name__ == "__main__":
    main()
