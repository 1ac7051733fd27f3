"""What only a GPU can show, in five minutes on one: python tests/gpu/check.py (docs/gpu.md says what it means).

Kernels of experts against a CPU, both roles of a pipeline on one device against the plain loop, places where the host
waits for the device, speed, overlap and memory. Prints a table, writes JSON, and ends with 1 where something is wrong.
With `--device cpu` the same code runs in small. Started by torchrun on several GPUs, it trains over NCCL instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from expert_cases import Case, errors, make_case, sharded
from gpu_rows import LARGE, SMALL, Device, Row, Sizes, name_of, table
from local_job import LocalJob, make_batches, plain_step, user_step, worst_difference
from rank_job import RankJob
from tiny import TinyExperts, TinyMoE, tiny

from lightning_afd.device import HostValues, SideStream
from lightning_afd.model.experts import ExpertShard, has_fast_grouped_mm
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import join_gradients
from lightning_afd.runtime import Handler, Runtime
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.transport.nccl import NcclTransport
from lightning_afd.transport.ordered import OrderedNetwork
from lightning_afd.transport.p2p import ProcessGroups

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
TOLERANCES = {FP32: 1e-4, BF16: 4e-2}
EQUAL = 1e-8
"""In float64, as rounding in less lets some tokens choose other experts."""
SEVERAL = Layout(attention=2, ffn=2)


def experts_equal_the_cpu(device: Device, sizes: Sizes) -> Iterator[Row]:
    """Forward, input and weight gradients of two shards, on this device and by float64 loops on the CPU."""
    wide = replace(
        sizes.model, hidden=max(16, sizes.model.hidden // 8), expert_width=max(8, sizes.model.expert_width // 8)
    )
    for dtype in (FP32, BF16):
        torch.manual_seed(0)
        module = TinyExperts(wide).to(dtype)
        half, tokens = wide.experts // 2, 8 * wide.experts + 3
        split = (range(half), range(half, wide.experts))
        case = make_case(module, tokens, wide.top_k, range(wide.experts - 1), dtype)  # the last one has no rows
        exact = Case(case.x.double(), case.idx, case.w.double(), case.dy.double())
        wanted = sharded(module.double(), split, exact, grouped=False)
        there = Case(*(part.to(device.torch) for part in (case.x, case.idx, case.w, case.dy)))
        found = sharded(module.to(device.torch, dtype), split, there)
        for result in (found,):
            result.y, result.dx, result.dw = (part.cpu() for part in (result.y, result.dx, result.dw))
            result.gradients = {name: grad.cpu() for name, grad in result.gradients.items()}
        worst = max(errors(found, wanted).values())
        yield Row(f"experts in {name_of(dtype)} against float64 on the CPU", worst, "", worst < TOLERANCES[dtype])


def batches_of(device: Device, replicas: int, sizes: Sizes) -> list[list[Tensor]]:
    """Micro-batches of different sizes."""
    vocab, longer = sizes.model.vocab, max(0, sizes.length // 8 - 3)
    return [[ids.to(device.torch) for ids in mine] for mine in make_batches(replicas, 4, longer=longer, vocab=vocab)]


def model_of(device: Device, sizes: Sizes, dtype: torch.dtype) -> TinyMoE:
    return tiny(**asdict(sizes.model)).to(device.torch, dtype)


def roles_equal_the_plain_loop(device: Device, sizes: Sizes) -> Iterator[Row]:
    """Both roles on one device, messages as NCCL has them; each order, and both ways to size messages."""
    small = replace(sizes, model=replace(sizes.model, hidden=max(16, sizes.model.hidden // 8)))
    model, batches = model_of(device, small, FP64), batches_of(device, 2, small)
    loss, grads = plain_step(model, batches)
    for order in ORDERS:
        for capacity in ("counted", "full"):
            job = LocalJob(model, SEVERAL, order, network=OrderedNetwork(SEVERAL), capacity=capacity)
            worst = max(job.step(batches).difference(loss, grads, noise=EQUAL) for _ in range(2))
            yield Row(f"{order}, {capacity}: from the plain loop", worst, "", worst < EQUAL)


def pipeline(device: Device, sizes: Sizes) -> Iterator[Row]:
    """A bfloat16 pipeline with both roles on one device: where the host waits, time, memory from step to step."""
    layout = Layout(attention=1, ffn=1)
    model = model_of(device, sizes, BF16)
    ids = torch.randint(0, sizes.model.vocab, (1, sizes.length), device=device.torch)
    fast = has_fast_grouped_mm(torch.empty(0, device=device.torch, dtype=BF16))
    for capacity in ("counted", "full"):
        job = LocalJob(model, layout, network=OrderedNetwork(layout), capacity=capacity)

        def run(job: LocalJob = job) -> None:
            for own in job.models:
                for parameter in own.parameters():
                    parameter.grad = None
            job.run([[user_step(job.models[0], ids, 0.25) for _ in range(4)]])

        for _ in range(3):
            run()
        device.wait()
        before = device.allocated()
        with device.noting_waits() as places:
            run()
        device.wait()
        expected = "" if fast or not device.is_gpu else "no grouped kernel here: loops over experts wait once per layer"
        where = ", ".join(dict.fromkeys(places)) or expected
        yield Row(f"{capacity}: waits for the device in a step", len(places), "", not places or not fast, where)
        yield Row(f"{capacity}: step", device.seconds(run, sizes.repetitions) * 1e3, "ms")
        grown = device.allocated() - before
        yield Row(f"{capacity}: memory that later steps added", grown / 2**20, "MiB", grown <= 2**20)
    if device.is_gpu:
        yield Row("largest use of memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        yield Row("reserved behind it", torch.cuda.memory_reserved() / 2**30, "GiB")


def nothing_is_used_too_early(device: Device, sizes: Sizes) -> Iterator[Row]:
    """Gradients in bfloat16, where the host never waits, against those of a host that waits after each action."""
    model, batches = model_of(device, sizes, BF16), batches_of(device, 2, sizes)
    for choices in ({"capacity": "counted"}, {"capacity": "full"}, {"dedup": False}):
        jobs = [LocalJob(model, SEVERAL, network=OrderedNetwork(SEVERAL), **choices) for _ in range(2)]
        for engine in jobs[1].engines:
            wait_after_each_action(engine.runtime, device)
        for _ in range(2):
            free, waiting = (job.step(batches) for job in jobs)
        worst = free.difference(waiting.loss, waiting.replicas[0])
        (choice,) = (f"{name}={value}" for name, value in choices.items())
        yield Row(f"{choice}: from a host that waits", worst, "", worst < TOLERANCES[BF16])


def wait_after_each_action(runtime: Runtime, device: Device) -> None:
    """Let each action of a rank come to its end on the device before the next one is launched."""

    def waiting(handler: Handler) -> Handler:
        return lambda action: (handler(action), device.wait())[0]

    runtime._tables = {
        worker: {kind: waiting(handler) for kind, handler in table.items()} for worker, table in runtime._tables.items()
    }


def three_passes(shard: ExpertShard, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> None:
    """Forward, input gradient and weight gradient."""
    _, saved = shard.forward(x_TH, idx_TK, w_TK)
    assert saved is not None
    _, _, pending = shard.backward(saved, x_TH)
    shard.weight_gradient(pending)


def expert_speed(device: Device, sizes: Sizes) -> Iterator[Row]:
    """Experts against one matrix product with as many operations."""
    for dtype in (BF16, FP32):
        config = sizes.model
        shard = ExpertShard(TinyExperts(config).to(device.torch, dtype))
        x = torch.randn(sizes.rows, config.hidden, device=device.torch).to(dtype)
        idx = torch.rand(sizes.rows, config.experts, device=device.torch).argsort(1)[:, : config.top_k].int()
        w = torch.full((sizes.rows, config.top_k), 1 / config.top_k, device=device.torch).to(dtype)

        rows = sizes.rows * config.top_k
        flops = 3 * 2 * rows * 3 * config.hidden * config.expert_width
        rate = flops / device.seconds(partial(three_passes, shard, x, idx, w), sizes.repetitions) / 1e12
        left, right = x.repeat(config.top_k, 1), torch.randn(config.hidden, 3 * config.expert_width).to(x)
        peak = flops / 3 / device.seconds(partial(torch.mm, left, right), sizes.repetitions) / 1e12
        yield Row(f"experts in {name_of(dtype)} ({shard.kernel}), three passes", rate, "TFLOP/s")
        yield Row(f"one product in {name_of(dtype)} of as many operations", peak, "TFLOP/s")


def overlap(device: Device, sizes: Sizes) -> Iterator[Row]:
    """Rows that are packed beside a computation launched before them, as a dispatch beside the next segment."""
    if not device.is_gpu:
        return
    x = torch.randn(sizes.rows, sizes.model.hidden, device=device.torch, dtype=BF16)
    square = torch.randn(sizes.model.hidden, sizes.model.hidden, device=device.torch, dtype=BF16)
    side, order = SideStream(device.torch), torch.randperm(len(x), device=device.torch)
    for _ in range(2):
        counts = HostValues(torch.ones(4, device=device.torch))
        start, packed, computed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        y = x
        for _ in range(50):
            y = y @ square
        computed.record()
        counts.wait()
        with side.behind(counts.mark):
            x.index_select(0, order)
            packed.record()
        device.wait()
    ahead = packed.elapsed_time(computed)
    yield Row("computation of", start.elapsed_time(computed), "ms")
    yield Row("of which was left when rows had been packed", ahead, "ms", ahead > 0)


def one_rank(device: Device, sizes: Sizes) -> Iterator[Row]:
    """All process groups of a job of one rank, whose messages go to itself, made with the options of a real one."""
    small = replace(sizes, model=replace(sizes.model, hidden=max(16, sizes.model.hidden // 8)))
    dist.init_process_group("nccl" if device.is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield over_groups(device, small, Layout.together(1), "flowmoe")
    finally:
        dist.destroy_process_group()


def over_groups(device: Device, sizes: Sizes, layout: Layout, order: str) -> Row:
    """Two steps over process groups against the plain loop; collective."""
    rank = dist.get_rank()
    groups = ProcessGroups(layout, rank, timedelta(seconds=60))
    groups.warm(device.torch)
    model, batches = model_of(device, sizes, FP64), batches_of(device, layout.attention, sizes)
    loss, grads = plain_step(model, batches)
    whole = tiny(**asdict(sizes.model))
    transport = NcclTransport(groups, device.torch)
    job = RankJob(model, layout, rank, transport, order)
    for _ in range(2):
        mine, held = job.step(batches)
    parts: list[Any] = [None] * layout.world
    dist.all_gather_object(parts, (mine, {name: grad.cpu() for name, grad in held.items()}), group=groups.control)
    joined = join_gradients(whole, layout, [part for _, part in parts], 0)
    worst = worst_difference(joined, {name: grad.cpu() for name, grad in grads.items()}, EQUAL)
    worst = max(worst, abs(sum(share for share, _ in parts) - loss) / abs(loss))
    groups.destroy()
    return Row(f"{layout.describe()}, {order}, over {dist.get_backend()}", worst, "", worst < EQUAL)


def several_ranks(device: Device, sizes: Sizes) -> Iterator[Row]:
    """On the ranks that torchrun has started: separate roles and both on each."""
    world = dist.get_world_size()
    small = replace(sizes, model=replace(sizes.model, hidden=max(16, sizes.model.hidden // 8)))
    yield over_groups(device, small, Layout(attention=world // 2, ffn=world - world // 2), "af-pipe")
    yield over_groups(device, small, Layout.together(world), "flowmoe")
    if world == 4:
        yield over_groups(device, small, Layout(attention=1, ffn=1, groups=2), "zero-bubble")


CHECKS = (
    experts_equal_the_cpu,
    roles_equal_the_plain_loop,
    nothing_is_used_too_early,
    pipeline,
    expert_speed,
    overlap,
    one_rank,
)
Check = Callable[[Device, Sizes], Iterator[Row]]


def run(device: Device, sizes: Sizes, checks: Sequence[Check] = CHECKS) -> list[Row]:
    """All rows; a check that raises is a row that says so, and the others still run."""
    rows: list[Row] = []
    for check in checks:
        try:
            rows += check(device, sizes)
        except Exception as error:
            rows.append(Row(check.__name__, float("nan"), "", False, f"{type(error).__name__}: {error}"))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the number of those that failed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the rows are written")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # before the first call of CUDA; docs/gpu.md says why
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible to torch: use --device cpu for a small run without one")
        return 1
    device = Device(options.device)
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together:
        if device.is_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            device.torch = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl" if device.is_gpu else "gloo")
    rows = run(device, LARGE if device.is_gpu else SMALL, (several_ranks,) if together else CHECKS)
    if not together or dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.is_gpu else "cpu"
        print(f"{name}, torch {torch.__version__}\n{table(rows)}")
        figures = {"device": name, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if together:
        dist.destroy_process_group()
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
