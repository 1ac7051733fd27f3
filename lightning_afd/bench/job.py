"""What the contenders on one rank share: processes, connections, model, data, and the way in which steps are timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_afd.bench.workload import Workload
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.transport.nccl import transport_of
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups

Step = Callable[[], float]
"""One optimizer step of this rank; returns its part of the loss of the global batch (the parts of all ranks add up)."""
PROBE_BYTES, PROBES = 2 * 2**20, 4
"""Messages by which the rate of a link is measured."""


@dataclass(frozen=True, kw_only=True)
class Arena:
    """How the ranks of a run are used."""

    workload: Workload
    attention: int = 1
    """A ranks of the contenders with attention and experts apart; collocated ones use all ranks for both."""
    ffn: int = 1
    micro_batches: int = 4
    """Of contenders that overlap, where their name says nothing else."""
    chunk_bytes: int | None = 2**20
    """S_p of contenders that overlap sums of dense gradients with the step; None: they sum at its end."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where each rank of the node has a GPU of its own."""
    timeout: float = 300.0
    """Seconds that a rank waits for a message."""

    @property
    def world(self) -> int:
        return self.attention + self.ffn


class Job:
    """One rank of the run; torch.distributed is initialised by `open`."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.workload = arena, arena.workload
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = device_of(arena.device)
        self._timeout = timedelta(seconds=arena.timeout)
        self._groups: dict[Layout, ProcessGroups] = {}
        self._transports: dict[Layout, P2PTransport] = {}
        self._control = dist.new_group(timeout=self._timeout, backend="gloo")
        self._probes = [dist.new_group(timeout=self._timeout) for _ in range(2)]
        for group in self._probes:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    @classmethod
    def open(cls, arena: Arena) -> Job:
        """Connect this process with the others, as the variables of torchrun say."""
        device = device_of(arena.device)
        timeout = timedelta(seconds=arena.timeout)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        return cls(arena)

    def close(self) -> None:
        """Leave, together with all ranks."""
        self.gather(None)
        for groups in self._groups.values():
            groups.destroy()
        dist.destroy_process_group()

    def use(self, workload: Workload, micro_batches: int | None = None) -> None:
        """What contenders train from now on; those that were made before must not run any more."""
        self.workload = workload
        self.arena = replace(self.arena, workload=workload, micro_batches=micro_batches or self.arena.micro_batches)

    def transport(self, layout: Layout) -> P2PTransport:
        """Collective at the first call: the connections that all contenders with this layout use."""
        if layout not in self._transports:
            groups = ProcessGroups(layout, self.rank, self._timeout)
            groups.warm(self.device)
            self._groups[layout] = groups
            self._transports[layout] = transport_of(groups, self.device)
        return self._transports[layout]

    def rows(self, step: int, index: int, replicas: int) -> Tensor:
        """Ids [b, S] that data replica `index` of so many gets in a step."""
        return self.workload.batch(step).tensor_split(replicas)[index].to(self.device)

    def gather(self, value: Any) -> list[Any]:
        """Collective: every rank's value, by rank, on all ranks."""
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, value, group=self._control)
        return everyone

    def slowest(self, action: Callable[[], Any]) -> tuple[float, list[Any]]:
        """Collective: seconds of an action on the slowest rank, all beginning at once, and its results by rank."""
        dist.barrier(group=self._control)
        self._finish()
        start = time.perf_counter()
        value = action()
        self._finish()
        both = self.gather((time.perf_counter() - start, value))
        return max(seconds for seconds, _ in both), [value for _, value in both]

    def link_rate(self) -> float:
        """Collective: bytes per second of plain messages from the last rank to the first one."""
        if self.world == 1:
            return float("inf")
        last = range(self.world - 1, self.world)
        self.send_to_first(last, PROBE_BYTES, 1)  # uses up what a token bucket allows at full speed
        seconds, _ = self.slowest(lambda: self.send_to_first(last, PROBE_BYTES, PROBES))
        return PROBES * PROBE_BYTES / seconds

    def send_to_first(self, senders: range, nbytes: int, count: int, *, both: bool = False) -> None:
        """Collective: `count` messages of each of `senders` to rank 0, with `both` also of rank 0 to each of them."""
        peers = senders if self.rank == 0 else (0,) if self.rank in senders else ()
        receives, sends = (self.rank == 0 or both), (self.rank != 0 or both)
        works: list[Any] = []
        for peer in peers:
            back = int(self.rank > peer)  # a group per direction: notices of buffers never wait behind messages
            buffers = torch.empty(count if receives else 0, nbytes, dtype=torch.uint8, device=self.device)
            works += [dist.irecv(buffer, src=peer, group=self._probes[1 - back]) for buffer in buffers]
        for peer in peers if sends else ():
            message = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            back = int(self.rank > peer)
            works += [dist.isend(message, dst=peer, group=self._probes[back]) for _ in range(count)]
        for work in works:
            work.wait()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def device_of(name: str, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this process, whose place `environment` says as torchrun does: a GPU is never shared.

    Raises PlanError for "cuda" where the ranks of this node have fewer GPUs.
    """
    if name == "cpu":
        return torch.device("cpu")
    ranks = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("WORLD_SIZE") or 1)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < ranks:
        if name == "auto":
            return torch.device("cpu")
        raise PlanError(
            f"device=cuda: {gpus} GPUs for the {ranks} ranks of this node (LOCAL_WORLD_SIZE): each needs its own, "
            "else say device=cpu"
        )
    device = torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
