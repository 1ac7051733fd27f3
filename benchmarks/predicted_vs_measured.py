"""Predicted step time beside the measured one: real models on real ranks (gloo) that calibrate the cost model first.

Two predictions of each step: by the calibrated cost model alone, and corrected by a trial, as at the start of a fit: a
step of a model with two MoE layers per group is measured on the layout, and takes what it takes instead of what the
cost model says. The whole model has eight.

Every rank computes with one thread. Where there are fewer cores than ranks, ranks share them: the calibration measures
that (all ranks at once, one alone), and says how many ranks compute at full speed at the same time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from lightning_afd.allocate.calibration import Calibration
from lightning_afd.allocate.candidates import simulated
from lightning_afd.allocate.request import Candidate
from lightning_afd.bench.start import free_port
from lightning_afd.calibrate import RankLinks, calibrate
from lightning_afd.cost.job import PRECISIONS, BatchShape, Choices
from lightning_afd.engine import Engine
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.recipes.local_job import micro_batch_loss, step_of
from lightning_afd.recipes.shapes import named_cluster
from lightning_afd.reduction import StepGradients
from lightning_afd.schedule.orders import Knobs
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups

CPU = torch.device("cpu")
CHOICES = Choices(precision=PRECISIONS["32"])


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its micro-batches."""

    hidden: int
    width: int
    experts: int
    top_k: int
    rows: int
    length: int
    layers: int = 8
    vocab: int = 1024

    @property
    def batch(self) -> BatchShape:
        return BatchShape.rows(self.rows, self.length)

    def model(self) -> nn.Module:
        """On the meta device."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            "qwen3_moe",
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 32,
            num_key_value_heads=self.hidden // 64,
            head_dim=32,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.width,
            vocab_size=self.vocab,
        )
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model


SIZES = {
    "small": Size(hidden=128, width=128, experts=8, top_k=2, rows=2, length=128),
    "standard": Size(hidden=256, width=256, experts=8, top_k=4, rows=1, length=512),
}
LAYOUTS = {
    2: (Layout(attention=1, ffn=1),),
    4: (
        Layout(attention=2, ffn=2),
        Layout(attention=3, ffn=1),
        Layout(attention=1, ffn=3),
        Layout(attention=1, ffn=1, groups=2),
    ),
}
FEW = 2
"""MoE layers per group in a trial (strategies/planning/trials.py)."""
ORDERS = (("sequential", 4), ("af-pipe", 4), ("af-pipe", 8), ("zero-bubble", 8))
"""And micro-batches per A rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is predicted and measured."""

    layout: Layout
    order: str
    micro_batches: int

    @property
    def group(self) -> int:
        """The engine's own: runs of G = 2P."""
        return 4 * self.layout.depth

    def __str__(self) -> str:
        return f"{self.layout.describe():<28} {self.order:<11} R={self.micro_batches}"

    def predicted(self, calibration: Calibration, layers: int | None = None) -> float:
        """Seconds of a step by the planner, of so many layers only if that is said."""
        candidate = Candidate(
            layout=self.layout,
            order=self.order,
            group=self.group,
            micro_batches=self.micro_batches,
            passes=1,
            recompute="none",
            recompute_experts=False,
            formula_seconds=0.0,
            bound_seconds=0.0,
            memory_bytes=0.0,
        )
        request = calibration.request(self.micro_batches * self.layout.attention)
        shapes = request.model.layers[:layers]
        return simulated(replace(request, model=replace(request.model, layers=shapes)), candidate).seconds

    @property
    def few(self) -> int:
        """Layers of a trial."""
        return FEW * self.layout.depth


class Job:
    """One rank of a case, with an optimizer."""

    def __init__(self, case: Case, size: Size, rank: int, transport: P2PTransport) -> None:
        self._case, self._rank = case, rank
        self._model = size.model()
        plan, layers = make_plan(
            self._model,
            case.layout,
            order=case.order,
            micro_batches=case.micro_batches,
            knobs=Knobs(group=case.group),
        )
        self._engine = Engine(plan, rank, transport, transport)
        self._engine.place(self._model, layers)
        self._engine.materialise(self._model, layers, CPU)
        self._engine.connect(self._model, layers, CPU)
        owned = [parameter for _, parameter in owned_parameters(self._model)]
        engine = self._engine
        self._gradients = StepGradients(owned, dense_parameters(self._model), engine.sums, engine.collectives)
        self._optimizer = torch.optim.AdamW(owned, lr=1e-4)
        generator = torch.Generator().manual_seed(rank)
        shape = (case.micro_batches, size.rows, size.length)
        self._ids_RBS = torch.randint(0, size.vocab, shape, generator=generator)

    def step(self) -> None:
        """As Lightning's loop calls it, without Lightning."""
        engine, count = self._engine, self._case.micro_batches
        steps = [
            step_of(lambda ids=ids: micro_batch_loss(self._model, ids), 1 / count)  # type: ignore[misc]
            for ids in (self._ids_RBS if engine.is_attention else ())
        ]
        engine.agree(len(steps), float(len(steps)))
        self._gradients.begin(last=True)
        engine.run(steps, count, training=True)
        self._gradients.end()
        self._optimizer.zero_grad()
        self._gradients.install(torch.ones(()), last=True)
        self._optimizer.step()


def cases(world: int) -> Iterator[Case]:
    for layout in LAYOUTS[world]:
        for order, micro_batches in ORDERS:
            yield Case(layout=layout, order=order, micro_batches=micro_batches)


def seconds_of(job: Job) -> float:
    """Of one step, from the first rank's start to the last one's end."""
    dist.barrier()
    start = time.perf_counter()
    job.step()
    mine = (start, time.perf_counter())
    everyone: list[tuple[float, float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return max(end for _, end in everyone) - min(begin for begin, _ in everyone)


def work(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transports = {}
    for layout in LAYOUTS[world]:
        groups = ProcessGroups(layout, rank, timedelta(seconds=120))
        groups.warm(CPU)
        transports[layout] = groups, P2PTransport(groups, CPU)
    for name in options.sizes:
        compare(name, rank, world, {layout: transport for layout, (_, transport) in transports.items()}, options)
    dist.barrier()
    for groups, _ in transports.values():
        groups.destroy()
    dist.destroy_process_group()


def compare(
    name: str, rank: int, world: int, transports: dict[Layout, P2PTransport], options: argparse.Namespace
) -> None:
    size, links = SIZES[name], RankLinks.over_default_group((0,) * world, CPU)
    jobs = {case: Job(case, size, rank, transports[case.layout]) for case in cases(world)}
    trials = {case: Job(case, replace(size, layers=case.few), rank, transports[case.layout]) for case in jobs}
    for job in (*jobs.values(), *trials.values()):
        seconds_of(job)  # the first step asks for buffers
    rounds = []
    for _ in range(options.rounds):
        calibration = measured_rates(size, links, options)
        few = measured_steps(trials, options.repeat)
        rounds.append(Round(calibration=calibration, few=few, whole=measured_steps(jobs, options.repeat)))
    if rank == 0:
        report(name, world, rounds)


@dataclass(frozen=True, kw_only=True)
class Round:
    """A calibration and what was measured behind it."""

    calibration: Calibration
    few: dict[Case, list[float]]
    """Seconds of trials."""
    whole: dict[Case, list[float]]
    """Seconds of steps."""

    def predicted(self, case: Case) -> float:
        return case.predicted(self.calibration)

    def corrected(self, case: Case) -> float:
        """Seconds of a step by the planner, behind a trial."""
        trial = statistics.median(self.few[case])
        return self.predicted(case) * trial / case.predicted(self.calibration, case.few)

    def measured(self, case: Case) -> float:
        return statistics.median(self.whole[case])


def measured_steps(jobs: dict[Case, Job], repeat: int) -> dict[Case, list[float]]:
    """Seconds of steps, all cases in turn."""
    found: dict[Case, list[float]] = {case: [] for case in jobs}
    for _ in range(repeat):
        for case, job in jobs.items():
            found[case].append(seconds_of(job))
    return found


def measured_rates(size: Size, links: RankLinks, options: argparse.Namespace) -> Calibration:
    return calibrate(
        size.model(),
        size.batch,
        named_cluster("local"),
        links,
        budget_seconds=options.budget,
        progress=lambda text, share: None,
        choices=CHOICES,
    )


def report(name: str, world: int, rounds: list[Round]) -> None:
    """Measured over predicted: each round's steps with the calibration and trials before them."""
    lines = [f"{world} ranks, {name}: {rates(found.calibration)}" for found in rounds]
    for case in rounds[0].whole:
        took = statistics.median(found.measured(case) for found in rounds) * 1e3
        alone, trial = (
            sorted(found.measured(case) / told(found, case) for found in rounds)
            for told in (Round.predicted, Round.corrected)
        )
        lines.append(f"{case}  {took:7.1f} ms  over the cost model's {spread(alone)}  behind a trial {spread(trial)}")
    print("\n".join(lines), flush=True)  # noqa: T201


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def rates(calibration: Calibration) -> str:
    """What was measured."""
    cluster, link = calibration.cluster, calibration.cluster.nvlink
    scales = " ".join(f"{kind} {scale.factor:.2f}" for kind, scale in cluster.device.scales.items())
    return (
        f"{cluster.at_once:.2f} ranks at full speed at the same time; a message takes {link.host_us:.0f} us and "
        f"{link.host_us_per_mib:.0f} us per MiB of a core; links {link.gb_per_s:.2f} GB/s, "
        f"{link.latency_us:.0f} us, half at {link.half_kib:.0f} KiB; measured over estimated: {scales}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=LAYOUTS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3, help="of a calibration and steps")
    parser.add_argument("--repeat", type=int, default=3, help="steps of each case in a round")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of a calibration")
    options = parser.parse_args()
    for world in options.ranks:
        multiprocessing.spawn(work, (world, free_port(), options), nprocs=world)


if __name__ == "__main__":
    main()
