"""How wrong the closed formula is against the simulator, and how much slower plans are than the best of everything.

python benchmarks/planner_regret.py [--instances 12] [--seed 0]

Each instance is a random job (model of the papers, layers, length, batch, nodes, network) on devices with much memory;
all its layouts, orders and runs are simulated. Printed are the formula's error over all of them, and
the regret of `choose`: its step time over the least of all.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from statistics import median, quantiles

from lightning_afd.allocate.candidates import simulated, ways
from lightning_afd.allocate.choose import Effort, choose
from lightning_afd.allocate.fit import Fitting
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.cost.config import model_shape
from lightning_afd.cost.job import BatchShape, Choices
from lightning_afd.placement import Layout
from lightning_afd.recipes.shapes import model_fields, named_cluster

MODELS = ("deepseek_moe_paper", "gpt_oss_paper", "qwen3_paper")


def drawn(dice: random.Random) -> Request:
    """A job on 3 to 8 devices."""
    fields = {**model_fields(dice.choice(MODELS)), "num_hidden_layers": dice.choice((4, 8)), "vocab_size": 4096}
    cluster, nodes, devices = named_cluster("h800_16x8"), dice.choice((1, 2)), dice.randint(3, 4)
    cluster = replace(cluster, num_nodes=nodes, devices_per_node=devices, nics_per_node=devices)
    return Request(
        model=model_shape(fields),
        cluster=replace(
            cluster,
            nic=replace(cluster.nic, gb_per_s=dice.choice((10, 50, 200))),
            device=replace(cluster.device, memory_gb=1e6),
        ),
        batch=BatchShape.rows(1, dice.choice((2048, 8192, 32768))),
        parts=dice.choice((8, 24)),
        choices=Choices(dedup=dice.choice(("rank", "node"))),
        groups=(1, 2),
    )


def everything(request: Request) -> list[Candidate]:
    """All ways to run a step, simulated."""
    devices, experts, fitting = request.cluster.devices, min(e.experts for e in request.model.moe), Fitting(request)
    found = []
    for groups in request.groups:
        for attention in range(1, devices // groups):
            for ffn in range(1, min(experts, devices // groups - attention) + 1):
                layout = Layout(attention=attention, ffn=ffn, groups=groups)
                for order in request.orders:
                    found += [simulated(request, way) for way in ways(request, fitting, layout, order=order)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    errors: list[float] = []
    regrets: list[float] = []
    for number in range(options.instances):
        request = drawn(dice)
        found = everything(request)
        own = [abs(c.formula_seconds / c.seconds - 1) for c in found if c.order == "af-pipe"]
        best = min(candidate.seconds for candidate in found)
        regrets.append(choose(request, Effort(predict={})).best.seconds / best - 1)
        errors += own
        sys.stdout.write(f"{number}: {len(found)} ways, formula {median(own):.1%} off, regret {regrets[-1]:.2%}\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"formula against simulator, af-pipe: median {median(errors):.1%}, p90 {quantiles(errors, n=10)[-1]:.1%}, "
        f"max {max(errors):.1%} of {len(errors)}; regret: median {median(regrets):.2%}, max {max(regrets):.2%}\n"
    )


if __name__ == "__main__":
    main()
