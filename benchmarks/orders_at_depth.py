"""Simulated steps of three models on 128 GPUs and 512 sequences: how near the orders come to the bound of their lanes.

Costs are plain tables of FLOPs over rates (H800: 989e12 FLOP/s, 50e9 B/s per NIC and direction); experts see one copy
of a token per node of 8. For each model and length the few best divisions by a formula are simulated with runs of
P, 1.5P and 2P micro-batches; printed is the fastest.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_afd.load import Link, Load, by_kind
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import Knobs, build
from lightning_afd.schedule.shape import Shape
from lightning_afd.simulate import Simulation, simulate

FLOPS, HBM, NIC, LATENCY = 989e12, 3.35e12 * 0.7, 50e9 * 0.8, 30e-6
GPUS, SEQUENCES, NODE = 128, 512, 8


@dataclass(frozen=True)
class Model:
    """Sizes of a model: layers, experts, top-k, hidden, expert width, widths of all heads and of K and V, window."""

    layers: int
    experts: int
    k: int
    hidden: int
    width: int
    q: int
    kv: int
    window: int = 0

    def seconds(self, length: int) -> dict[str, float]:
        """Seconds per token and layer on one GPU, by op and phase."""
        projections = (2 * self.hidden * (2 * self.q + self.kv + self.experts)) / (FLOPS * 0.65)
        core = 2 * length * self.q
        if self.window:
            core = (core + 4 * min(length, self.window) * self.q) / 2
        attention = 2 * (14 * self.hidden + 4 * (self.q + self.kv) + 2 * (self.k + 1) * self.hidden) / HBM
        experts, moved = 6 * self.k * self.hidden * self.width / (FLOPS * 0.55), 2 * self.k * (3 * self.width) / HBM
        moved += 2 * self.k * self.hidden / HBM
        return {
            "Af": projections + core / (FLOPS * 0.6) + attention,
            "Ab": projections + 2.5 * core / (FLOPS * 0.5) + 1.5 * attention,
            "Aw": projections,
            "Ef": experts + moved,
            "Eb": experts + 1.5 * moved,
            "Ew": experts,
        }


MODELS = {
    "DeepSeek-MoE": Model(28, 64, 4, 2048, 1408, 2048, 4096),
    "GPT-OSS-120B": Model(36, 128, 4, 2880, 2880, 4096, 1024, 128),
    "Qwen3-235B": Model(94, 128, 8, 4096, 1536, 8192, 1024),
}


@dataclass(frozen=True)
class Division:
    """`groups` times (`attention` + `ffn`) GPUs; an A rank takes one sequence at a time."""

    groups: int
    attention: int
    ffn: int

    @property
    def micro_batches(self) -> int:
        return -(-SEQUENCES // self.attention)

    def copies(self, k: int) -> float:
        """Nodes of an F group that a token visits, with uniform routing."""
        nodes = self.ffn // NODE
        return nodes * (1 - (1 - 1 / nodes) ** k)

    def seconds(self, model: Model, length: int) -> dict[str, float]:
        """Seconds of each action."""
        share = {"A": length, "E": length * self.attention / self.ffn}
        table = {kind: seconds * share[kind[0]] for kind, seconds in model.seconds(length).items()}
        return {**table, "Tf": 0, "Tb": 0, "Tw": 0}

    def estimate(self, model: Model, length: int) -> float:
        """About the seconds of a step: the busiest of attention, experts and NICs, and the warm-up."""
        table = self.seconds(model, length)
        attention, experts = (sum(table[op + phase] for phase in "fbw") for op in "AE")
        copies, rows = self.copies(model.k), 2 * self.attention * length * model.hidden * 2 / NIC
        network = rows * max((copies + (self.groups > 1)) / self.attention, copies / self.ffn)
        rounds = self.micro_batches * -(-model.layers // self.groups)
        return rounds * max(attention, experts, network) + (2 * self.groups - 1) * (attention + experts) / 3


def divisions(model: Model, length: int, most: int) -> list[Division]:
    """The best by their estimate."""
    found = [
        Division(groups, GPUS // groups - ffn, ffn) for groups in (1, 2, 4) for ffn in range(8, GPUS // groups, NODE)
    ]
    return sorted(found, key=lambda division: division.estimate(model, length))[:most]


def steps(model: Model, length: int, order: str, most: int) -> Iterator[tuple[Simulation, Division, int]]:
    """Simulated steps of the best divisions."""
    for division in divisions(model, length, most):
        table = division.seconds(model, length)
        split = order == "zero-bubble"
        shape = Shape(
            layers=model.layers,
            groups=division.groups,
            micro_batches=division.micro_batches,
            split_attention=split,
        )
        base = division.attention * length * model.hidden * 2
        rows = base * division.copies(model.k)
        link = Link(attention=division.attention * NIC, ffn=division.ffn * NIC, latency=LATENCY)
        pace = Pace(seconds=table, transfer=LATENCY + rows / min(link.attention, link.ffn))
        costs = table if split else {**table, "Ab": table["Ab"] + table["Aw"]}
        sizes = dict.fromkeys(("Df", "Db", "Cf", "Cb"), rows) | dict.fromkeys(("Hf", "Hb"), base)
        load = Load(seconds=by_kind(shape, costs), bytes=by_kind(shape, sizes), links=dict.fromkeys("DCH", link))
        for group in (2 * division.groups, 3 * division.groups, 4 * division.groups):
            yield simulate(build(order, shape, Knobs(group=group, pace=pace)), load), division, group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--divisions", type=int, default=3, help="how many divisions to simulate")
    options = parser.parse_args()
    sys.stdout.write("| model | tokens | order | p x (M + N), R, G | step, s | of the bound | busiest lane |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for name in options.models:
        for length in options.lengths:
            for order in ("af-pipe", "zero-bubble"):
                found = steps(MODELS[name], length, order, options.divisions)
                step, division, group = min(found, key=lambda candidate: candidate[0].seconds)
                worker, _, way = max(step.busy, key=lambda lane: step.busy[lane])
                sizes = (
                    f"{division.groups} x ({division.attention} + {division.ffn}), {division.micro_batches}, {group}"
                )
                share = f"{step.seconds:.2f} | {step.bound / step.seconds:.3f} | {worker.role} {way} |"
                sys.stdout.write(f"| {name} | {length} | {order} | {sizes} | {share}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
