"""Share of a training step that expert loads take: counting them, and per logged step their exchange and figures.

All ranks of a layout run in this process, and steps with and without counting alternate. What is reported are medians
of CPU time: of a step, of the difference within pairs of neighbouring steps, of counting alone, and of what a logged
step does on one rank beside the exchange itself, which is one message of 8 bytes per expert and layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd.callbacks import ExpertLoad
from lightning_afd.expert_load import ExpertCounts
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import Batches, LocalJob


def make_model(options: argparse.Namespace) -> nn.Module:
    """Qwen3-MoE with random weights; its attention and experts are real."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=options.hidden // 4,
        moe_intermediate_size=options.hidden // 2,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
    logits = model(ids_BS).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())


def seconds(function: Callable[[], Any]) -> float:
    """Of this process on the CPU, so that other processes of the machine do not matter."""
    start = time.process_time()
    function()
    return time.process_time() - start


def pairs_of_steps(job: LocalJob, batches: Batches, pairs: int) -> list[tuple[float, float]]:
    """Seconds without and with counting; which one comes first alternates."""
    found = []
    for pair in range(pairs + 1):
        times = {}
        for counting in (False, True) if pair % 2 else (True, False):
            for engine in job.engines:
                engine.expert_counts.enabled = counting
            times[counting] = seconds(lambda: job.step(batches))
        found.append((times[False], times[True]))
    return found[1:]


def counting_seconds(options: argparse.Namespace, repeats: int) -> float:
    """Counting of one step of one A rank."""
    counts = ExpertCounts((options.experts,) * options.layers, torch.device("cpu"))
    counts.enabled = True
    idx_TK = torch.randint(0, options.experts, (options.rows * options.positions, options.top_k))

    def step() -> None:
        for layer in range(options.layers):
            for _ in range(options.micro_batches):
                counts.add(layer, idx_TK)

    return statistics.median(seconds(step) for _ in range(repeats))


def logging_seconds(options: argparse.Namespace, repeats: int) -> float:
    """What the callback does in a logged step, with a logger that takes figures at no cost."""
    loads = tuple(torch.randint(1, 99, (options.experts,)) for _ in range(options.layers))
    balance = SimpleNamespace(count=lambda: None, loads=lambda: loads)
    logger = SimpleNamespace(log_metrics=lambda figures, step: None)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(balance=balance), loggers=[logger], callback_metrics={}, global_step=0
    )
    callback = ExpertLoad(every_n_steps=1)
    callback.on_train_start(trainer, None)  # type: ignore[arg-type]

    def step() -> None:
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, None)  # type: ignore[arg-type]

    return statistics.median(seconds(step) for _ in range(repeats))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="per micro-batch")
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of steps")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    ids = torch.randint(0, 512, (options.micro_batches, options.rows, options.positions))
    job = LocalJob(make_model(options), Layout(attention=1, ffn=1), micro_batches=options.micro_batches, loss=loss)
    pairs = pairs_of_steps(job, [list(ids)], options.pairs)
    step = statistics.median(without for without, _ in pairs)
    differences = sorted(counting / without - 1 for without, counting in pairs)
    counting, logging = counting_seconds(options, 20), logging_seconds(options, 20)
    text = (
        f"step {step * 1e3:.1f} ms; with counting {statistics.median(differences):+.2%} "
        f"(pairs from {differences[0]:+.2%} to {differences[-1]:+.2%}); counting alone {counting * 1e3:.2f} ms = "
        f"{counting / step:.2%}; a logged step {logging * 1e3:.2f} ms more = {logging / step:.2%}"
    )
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()
