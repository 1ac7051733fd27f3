"""S_p as the tuner chooses it against a full sweep, on a network that is as slow as asked.

Two attention ranks and one FFN rank, each in a network namespace of its own, behind links of `--rate` (veth and tc tbf;
needs root and iproute2). All variants live in the same processes. First the tuner runs over real steps, as in a fit;
then all sizes of a grid, "no chunks" and the tuner's choice are measured in turns. Everything that was set up is taken
down again, however this ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_afd.engine import Engine
from lightning_afd.model.place import dense_parameters, owned_parameters
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.reduction import StepGradients
from lightning_afd.segments import UserStep
from lightning_afd.strategies.tuning import ChunkSize
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups
from lightning_afd.tune import KIB, MIB, Tuning, in_bytes

LAYOUT = Layout(attention=2, ffn=1)
VOCABULARY, EXPERTS, TOP_K = 512, 4, 2
SWITCH, NET = "afdsw{0}", "afd{0}x{1}"
"""Names of namespaces, with the id of this process in them."""
GRID: tuple[int | None, ...] = (None, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 64 * MIB)


# -- the model ---------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, hidden, hidden) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, hidden, hidden // 2) * 0.02)
        self.act_fn = F.silu

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> Tensor:
        raise NotImplementedError("these experts are only ever split")


class Layer(nn.Module):
    """Causal attention, a router and experts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.router, self.experts = nn.Linear(hidden, EXPERTS), Experts(hidden)

    def forward(self, h_BSH: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(h_BSH).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h_BSH = h_BSH + self.out(mixed)
        x_TH = h_BSH.flatten(0, 1)
        w_TK, idx_TK = self.router(x_TH).softmax(-1).topk(TOP_K, dim=-1)
        return h_BSH + self.experts(x_TH, idx_TK, w_TK).view_as(h_BSH)


class Model(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids_BS: Tensor) -> Tensor:
        h_BSH = self.embedding(ids_BS)
        for layer in self.layers:
            h_BSH = layer(h_BSH)
        return F.cross_entropy(self.head(h_BSH)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())


# -- one rank ----------------------------------------------------------------------------------------------------------


class Job:
    """One rank's part of the job, and its steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        self.rank, device = dist.get_rank(), torch.device("cpu")
        rank_zero_only.rank = self.rank
        self.groups = ProcessGroups(LAYOUT, self.rank, timedelta(seconds=120))
        self.groups.warm(device)
        self.transport = P2PTransport(self.groups, device)
        torch.manual_seed(0)
        model = Model(args.hidden, args.layers)
        plan, layers = make_plan(model, LAYOUT, order=args.order, micro_batches=args.micro_batches)
        self.engine = Engine(plan, self.rank, self.transport, self.transport)
        self.engine.place(model, layers)
        self.engine.connect(model, layers, device)
        owned = [parameter for _, parameter in owned_parameters(model)]
        self.gradients = StepGradients(owned, dense_parameters(model), self.engine.sums, self.transport)
        self.parameters = owned
        batch = torch.randint(0, VOCABULARY, (args.micro_batches, 1, args.length))
        self.work = [_step_of(model, ids_BS) for ids_BS in batch] if self.engine.is_attention else []

    def step(self) -> float:
        """Seconds of one step on this rank, the sum of its gradients included."""
        for parameter in self.parameters:
            parameter.grad = None
        start = time.perf_counter()
        count = self.engine.agree(len(self.work), 0.0).micro_batches
        self.gradients.begin(last=True)
        self.engine.run(self.work, count, training=True)
        self.gradients.end()
        self.gradients.install(torch.ones(()), last=True)
        return time.perf_counter() - start

    def timed(self, chunk_bytes: int | None) -> float:
        """Seconds of the second of two steps with this chunk size, on the slowest rank."""
        if self.engine.sums is not None:
            self.engine.sums.chunk_bytes = chunk_bytes
        self.step()
        return max(seconds for (seconds,) in self.transport.all_gather([self.step()]))

    def say(self, text: str) -> None:
        if self.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def _step_of(model: Model, ids_BS: Tensor) -> UserStep:
    return UserStep(function=lambda: model(ids_BS), around=nullcontext, weight=0.25, loss_of=lambda loss: loss)


def rank_main(args: argparse.Namespace) -> None:
    """Tune, sweep, and print both on rank 0."""
    job = Job(args)
    sums = job.engine.sums
    job.say(f"{sums.nbytes / MIB if sums else 0:.1f} MiB of dense gradients per step, links of {args.rate}")
    size = ChunkSize("auto", Tuning(samples=args.samples, steps=args.steps), job.engine, dict)
    size.next_step(None)
    while size.searches:
        size.next_step(job.step())
    chosen = job.transport.broadcast_object(size.tuned and size.tuned.chunk_bytes, 0)
    if size.tuned is not None:
        job.say(f"tuner: {size.tuned}")
    arms = list(dict.fromkeys([*GRID, chosen]))
    times: dict[Any, list[float]] = {arm: [] for arm in arms}
    start = time.monotonic()
    for repetition in range(args.repetitions):
        ends = job.transport.all_gather([time.monotonic() - start])
        if repetition >= 2 and ends[0][0] > args.sweep_seconds:
            break
        for arm in arms if repetition % 2 == 0 else reversed(arms):
            times[arm].append(job.timed(arm))
    _report(job, times, chosen)
    job.groups.destroy()
    dist.destroy_process_group()


def _report(job: Job, times: dict[Any, list[float]], chosen: int | None) -> None:
    """Medians, and paired ratios to the chosen one: the speed of the machine changes meanwhile."""
    for arm, found in times.items():
        ratio = median(one / other for one, other in zip(found, times[chosen], strict=True))
        name = "no chunks" if arm is None else in_bytes(arm)
        mark = "  <- chosen" if arm == chosen else ""
        job.say(f"{name:>10}  {median(found):.4f} s  {min(found):.4f} to {max(found):.4f}  x {ratio:.3f}{mark}")
    job.say(f"{len(times[chosen])} repetitions")
    best = min(median(one / other for one, other in zip(found, times[chosen], strict=True)) for found in times.values())
    least = min(min(found) for found in times.values())
    job.say(f"chosen S_p over the best of the sweep: {1 / best:.3f}, fastest steps {min(times[chosen]) / least:.3f}")


# -- the network -------------------------------------------------------------------------------------------------------


def _ip(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def star(rate: str) -> Iterator[list[str]]:
    """One namespace per rank around a bridge, each link limited in both directions; yields their names."""
    me = os.getpid()
    switch, names = SWITCH.format(me), [NET.format(me, rank) for rank in range(LAYOUT.world)]
    limit = f"root handle 1: tbf rate {rate} burst 256kb latency 50ms"
    try:
        for name in (switch, *names):
            _ip(f"ip netns add {name}")
            _ip(f"ip -n {name} link set lo up")
        _ip(f"ip -n {switch} link add br0 type bridge")
        _ip(f"ip -n {switch} link set br0 up")
        for rank, name in enumerate(names):
            _ip(f"ip link add p{rank} netns {switch} type veth peer name eth0 netns {name}")
            _ip(f"ip -n {switch} link set p{rank} master br0")
            _ip(f"ip -n {switch} link set p{rank} up")
            _ip(f"ip -n {name} addr add 10.77.0.{rank + 1}/24 dev eth0")
            _ip(f"ip -n {name} link set eth0 up")
            _ip(f"tc -n {name} qdisc add dev eth0 {limit}")
            _ip(f"tc -n {switch} qdisc add dev p{rank} {limit}")
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def launch(args: argparse.Namespace, names: list[str]) -> int:
    """Start one rank per namespace and wait for all; returns the first exit code that is not 0."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    try:
        for rank, name in enumerate(names):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(names)), "OMP_NUM_THREADS": "1"}
            own |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
            command = ["ip", "netns", "exec", name, "taskset", "-c", str(cores[rank % len(cores)]), sys.executable]
            ranks.append(subprocess.Popen([*command, *sys.argv], env={**os.environ, **own}))
        return next((code for rank in ranks if (code := rank.wait(args.timeout))), 0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="500mbit", help="of each link, per direction")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--order", default="af-pipe")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sweep-seconds", type=float, default=600, help="no repetition begins after so long")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with star(args.rate) as names:
        return launch(args, names)


if __name__ == "__main__":
    sys.exit(main())
