"""Time of the engine's own work per action: coroutines, routing, headers, copies; no attention, experts or network."""

from __future__ import annotations

import argparse

import torch

from lightning_afd.bench.overhead import BareShape, costs
from lightning_afd.placement import Layout


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=int, default=1, help="A ranks: messages per action of the F rank")
    parser.add_argument("--ffn", type=int, default=1, help="F ranks: messages per action of the A rank")
    parser.add_argument("--tokens", type=int, default=4, help="tokens per micro-batch")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--order", default="af-pipe")
    parser.add_argument("--steps", type=int, default=50, help="repetitions")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    bare = BareShape(
        layout=Layout(attention=options.attention, ffn=options.ffn),
        order=options.order,
        layers=options.layers,
        micro_batches=options.micro_batches,
        tokens=options.tokens,
    )
    for cost in costs(bare, options.steps).values():
        cells = "  ".join(f"{kind} {seconds * 1e6:.0f}" for kind, seconds in cost.by_kind.items())
        whole = cost.step * 1e6 / cost.actions
        print(f"{cost.worker}: median {cost.action * 1e6:.0f} us per action ({cells}), whole step {whole:.0f} each")  # noqa: T201


if __name__ == "__main__":
    main()
