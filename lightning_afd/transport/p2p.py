"""torch.distributed as transport: asynchronous point-to-point messages, one process group per direction and use.

None of the groups is shared with Lightning's own collectives. All are made and warmed in one fixed order on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_afd.placement import Layout
from lightning_afd.transport.base import Channel, micro_batch_of
from lightning_afd.transport.lanes import Lane, Lanes

CPU = torch.device("cpu")
_TAIL = -1
CHANNEL_CTAS = 4
"""Most thread blocks, and so streaming multiprocessors, that messages of a lane may occupy on a GPU at a time."""


class ProcessGroups:
    """The process groups of one job: one per channel and lane, one for control messages, one per worker group.

    Several A ranks have another one, `chunks`, for sums that travel beside messages of the step. On GPUs messages are
    announced from host to host, in `announcements`.
    """

    def __init__(self, layout: Layout, rank: int, timeout: timedelta) -> None:
        everyone = list(range(layout.world))
        self._on_gpus = on_gpus = "nccl" in dist.get_backend_config()
        self._lanes = Lanes(layout, queues=on_gpus)
        ranks_of = self._lanes.all()
        make = partial(_new_group, timeout=timeout, on_gpus=on_gpus)
        self.channels: dict[Lane, Any] = {lane: make(ranks) for lane, ranks in ranks_of.items()}
        self.control = dist.new_group(everyone, timeout=timeout, backend="gloo")
        self.announcements = dist.new_group(everyone, timeout=timeout, backend="gloo") if on_gpus else self.control
        self.replicas: Any = None
        self.chunks: Any = None
        self.alone: Any = None
        for ranks in dict.fromkeys(layout.copies_of(other) for other in everyone):
            group = dist.new_group(list(ranks), timeout=timeout)
            on_the_way = len(ranks) > 1 and layout.worker_of(ranks[0]).role == "A"
            chunks = make(list(ranks)) if on_the_way else group
            if rank in ranks:
                self.replicas, self.chunks = group, chunks
        mine = [group for lane, group in self.channels.items() if rank in ranks_of[lane]]
        others = [self.control, self.announcements, self.replicas, self.chunks]
        self._all = list(dict.fromkeys([*mine, *others]))

    def make_alone(self) -> None:
        """A group of this rank only, `alone`; once, however often it is wanted. NCCL splits its communicator for it, in
        which all ranks take part: each asks for its own at the same place, whether it will use it or not.
        """
        if self.alone is None:
            self.alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self._all.append(self.alone)

    def between(self, channel: Channel, sender: int, receiver: int) -> Any:
        """The group of a channel for messages in this direction."""
        return self.channels[self._lanes.of(channel, sender, receiver)]

    def warm(self, device: torch.device) -> None:
        """One small collective per group, in the same order on all ranks: connections exist before the first step."""
        for group in self._all:
            where = CPU if group in (self.control, self.announcements) else device
            dist.all_reduce(torch.zeros(1, device=where), group=group)
        if self._on_gpus:
            self.introduce(device)

    def introduce(self, device: torch.device) -> None:
        """A byte between all that will talk in a lane, all at once: NCCL connects two ranks when they first do so, and
        keeps both hosts until then, for which a schedule has no room.
        """
        me = dist.get_rank()
        for lane, group in self.channels.items():
            talks = [talk for talk in self._lanes.talks(lane) if me in talk]
            operations = [
                dist.P2POp(dist.isend, torch.zeros(1, dtype=torch.uint8, device=device), receiver, group)
                if sender == me
                else dist.P2POp(dist.irecv, torch.zeros(1, dtype=torch.uint8, device=device), sender, group)
                for sender, receiver in talks
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def destroy(self) -> None:
        """Close all connections, as soon as no message that was posted or sent holds them."""
        for group in self._all:
            dist.destroy_process_group(group)
        self._all.clear()
        self.channels.clear()
        self.control = self.announcements = self.replicas = self.chunks = self.alone = None


def cut_off(groups: ProcessGroups | None) -> None:
    """End all connections of this process, those of Lightning too, whatever is on its way.

    NCCL would wait for messages that a rank that has failed never sends, so it is told to give them up.
    """
    if "nccl" in dist.get_backend_config():
        distributed_c10d._abort_process_group()
        return
    if groups is not None:
        groups.destroy()
    dist.destroy_process_group()


class P2PTransport:
    """Transport and Collectives over process groups; receives are posted ahead, sends do not block."""

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._rank = dist.get_rank()
        self._sends: defaultdict[tuple[int, str], list[tuple[Any, Tensor]]] = defaultdict(list)
        """By micro-batch and op."""
        self._posted: WeakSet[Posted] = WeakSet()
        self.sent_bytes = 0

    def post(self, channel: Channel, peer: int, tag: int, nbytes: int) -> Posted:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        group = self._groups.between(channel, peer, self._rank)
        work = dist.irecv(buffer, src=peer, group=group, tag=tag)
        return self.track(Posted(work, buffer))

    def track(self, posted: Posted) -> Posted:
        """Remember an open message, for `drop`."""
        self._posted.add(posted)
        return posted

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        self._send_in(self._groups.between(channel, self._rank, peer), channel, peer, (tag, tag), message)

    def _send_in(self, group: Any, channel: Channel, peer: int, tags: tuple[int, int], message: Tensor) -> None:
        """Send in a group, by the second of two tags, what `release` knows by the first one."""
        work = dist.isend(message, dst=peer, group=group, tag=tags[1])
        # Router logits are taken only before the tail, which later messages of the micro-batch do not tell about.
        key = _TAIL if channel in ("Lf", "Lb") else micro_batch_of(tags[0])
        self._sends[key, channel[0]].append((work, message))
        self.sent_bytes += message.numel()

    def release(self, micro_batch: int | None = None, *, but: str = "") -> None:
        for key in [key for key in self._sends if micro_batch in (None, key[0]) and key[1] not in but]:
            for work, _ in self._sends.pop(key):
                work.wait()

    def drop(self) -> None:
        """After a failure: forget all messages, whose references would keep connections open."""
        self._sends.clear()
        for posted in self._posted:
            posted.drop()

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=self._groups.control)
        return [row.tolist() for row in everyone]

    def broadcast_object(self, value: object, source: int) -> object:
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._groups.control)
        return box[0]

    def gather_object(self, value: object) -> list[Any] | None:
        """Every rank's `value` on rank 0, None on the others."""
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, everyone, dst=0, group=self._groups.control)
        return everyone

    def send_object(self, value: object, receiver: int) -> None:
        dist.send_object_list([value], dst=receiver, group=self._groups.control)

    def receive_object(self, sender: int) -> object:
        box = [None]
        dist.recv_object_list(box, src=sender, group=self._groups.control)
        return box[0]

    def start_sum(self, tensor: Tensor) -> Posted:
        work = dist.all_reduce(tensor, group=self._groups.control, async_op=True)
        return self.track(Posted(work, tensor))

    def sum_over_replicas(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._groups.replicas)

    def start_sum_over_replicas(self, tensor: Tensor) -> Posted:
        work = dist.all_reduce(tensor, group=self._groups.chunks, async_op=True)
        return self.track(Posted(work, tensor))

    def copy_from_first_replica(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group_src=0, group=self._groups.replicas)


class Posted:
    """A message or a sum that has been started in a process group."""

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def drop(self) -> None:
        self._work = None


def _new_group(ranks: list[int], *, timeout: timedelta, on_gpus: bool) -> Any:
    """A group whose messages or sums run beside computations: on a GPU they get few thread blocks, but go first."""
    options = None
    if on_gpus:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        options.config.min_ctas, options.config.max_ctas = 1, CHANNEL_CTAS
    return dist.new_group(ranks, timeout=timeout, pg_options=options)
