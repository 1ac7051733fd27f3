"""An ordinary script for several hosts, started by any launcher: fits a tiny model and writes down what this rank got.

Arguments: a folder for the result, and hosts, ranks per host, and the options of AFDStrategy as a dictionary.
"""

import ast
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from cases import weights
from fits import QUIET, tiny_module

from lightning_afd import AFDStrategy


class Losses(L.Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Keep what the step returned."""
        self.seen.append(float(outputs["loss"]))


def fit(nodes: int, devices: int, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps and the weights of this rank."""
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        num_nodes=nodes,
        devices=devices,
        strategy=AFDStrategy(micro_batches=2, **options) if nodes * devices > 1 else "auto",
        callbacks=[losses],
        precision="64-true",
        **QUIET,
    )
    module = tiny_module(steps=3)
    trainer.fit(module)
    return losses.seen, weights(module)


if __name__ == "__main__":
    folder, nodes, devices, *options = sys.argv[1:]
    results = [fit(int(nodes), int(devices), ast.literal_eval(option)) for option in options]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(results, Path(folder, f"rank{rank}.pt"))
