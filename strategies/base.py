"""What any strategy of this package is made of: ranks with roles, process groups, the first cause of a failure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_afd.namespace import MisconfigurationException, ParallelStrategy, namespace_of
from lightning_afd.nics import NicShares
from lightning_afd.placement import Layout
from lightning_afd.strategies.failure import FailureBoard, Patience
from lightning_afd.strategies.forks import OwnSockets
from lightning_afd.strategies.launcher import Ranks, WatchingLauncher
from lightning_afd.strategies.nics import NicsOfRoles, NodeRanks, apply_nics, make_reachable, wanted_nics
from lightning_afd.strategies.notes import Activity
from lightning_afd.strategies.seeds import Seeds
from lightning_afd.strategies.step_log import JOINED
from lightning_afd.strategies.watch import activity_of
from lightning_afd.transport.nccl import transport_of
from lightning_afd.transport.p2p import P2PTransport, ProcessGroups, cut_off

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import ClusterEnvironment


class RankedStrategy(ParallelStrategy):
    """Launching, process groups and collectives of a job whose ranks have roles."""

    layout: Layout
    patience = Patience()
    """Seconds that a failing job gives its ranks to stop by themselves."""
    nics: NicsOfRoles | str | None = None
    """NICs of each role by name, "auto" for what a plan says, or None."""
    nic_shares: NicShares | None = None
    """What a plan says, if there is one."""

    def __init__(
        self,
        *,
        timeout: timedelta,
        cluster_environment: ClusterEnvironment | None = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cluster_environment=cluster_environment, **options)
        self._num_nodes = 1
        self._timeout = timeout
        self._backend = process_group_backend
        self._groups: ProcessGroups | None = None
        self._board: FailureBoard | None = None
        self._failed = False
        self._sockets: OwnSockets
        self.transport: P2PTransport
        self.seeds: Seeds
        """Random numbers of this replica's micro-batches."""

    # -- what Lightning's accelerator connector and launcher ask --------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning injects samplers and reduces logs only where this is True."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        return self._backend

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        ranks = Ranks(tell=self._child_ended, begins=self._begins, met=self._have_met)
        self._launcher = WatchingLauncher.of(namespace_of(self).package)(
            self.cluster_environment, self.num_processes, self.num_nodes, ranks
        )

    def _begins(self, trainer: pl.Trainer) -> None:
        """Before this process starts others, and before anything of the Trainer's work."""

    def _child_ended(self, local_rank: int, code: int) -> bool:
        """Tell all ranks that a process of this host ended without success; whether there was a way to tell them."""
        board = self._board
        if board is None:
            return self._failed
        board.child_ended(self.node_rank * self.num_processes + local_rank, code)
        return True

    def _have_met(self) -> bool:
        return torch.distributed.is_initialized() or self._failed

    def expert_maps(self) -> list[dict[str, Any]]:
        """Which F rank owns which expert, per MoE layer, as plain values."""
        raise NotImplementedError

    # -- process groups -------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        lightning = namespace_of(self)
        lightning.fabric("utilities.seed").reset_seed()
        self._set_world_ranks()
        self._check_world()
        distributed = lightning.fabric("utilities.distributed")
        self._backend = self._backend or distributed._get_default_process_group_backend_for_device(self.root_device)
        self._choose_nics(self.layout)
        assert self.cluster_environment is not None
        device = None if self.root_device.type == "cpu" else self.root_device
        # Ranks of many hosts start at different times, and Lightning's own collectives wait for validation and disks.
        patience = max(self._timeout, timedelta(minutes=30))
        self._sockets = OwnSockets()
        with self._sockets.opening():
            meet = distributed._init_dist_connection
            meet(self.cluster_environment, self._backend, timeout=patience, device_id=device)
            self._failed = False
            self._board = FailureBoard.create(self.global_rank, self.layout, self._activity, self.patience)
            self.guarded(self._connect)

    def _choose_nics(self, layout: Layout) -> None:
        """Before anything is connected, as NCCL and gloo look only then."""
        first = self.node_rank * self.num_processes
        ranks = range(first, first + self.num_processes)
        node = NodeRanks(roles=tuple(layout.worker_of(r).role for r in ranks), local_rank=self.local_rank)
        backend = str(self._backend)
        apply_nics(wanted_nics(self.nics, self.nic_shares, node, backend), node, backend)
        if self.num_nodes > 1 and self.cluster_environment is not None:
            make_reachable(self.cluster_environment.main_address)

    def _connect(self) -> None:
        """Collective, once the ranks have met."""
        self.compare_plans(repr(self.layout))
        self.connect_ranks()

    def connect_ranks(self) -> None:
        """Collective: the groups in which the ranks talk during a step."""
        self._groups = ProcessGroups(self.layout, self.global_rank, self._timeout)
        self.transport = transport_of(self._groups, self.root_device)
        self._groups.warm(self.root_device)

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    def _check_world(self) -> None:
        """A launcher from outside may have started another number of processes than the Trainer was told."""
        if self.world_size != self.layout.world:
            raise MisconfigurationException(
                f"the layout {self.layout.describe()} needs {self.layout.world} ranks, but {self.world_size} were "
                f"started: set devices and num_nodes so that their product is {self.layout.world}"
            )

    def compare_plans(self, mine: str) -> None:
        """Collective: every rank must have made the same plan; raises MisconfigurationException on all ranks else."""
        digest = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7], "big")
        digests = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        own = torch.tensor([digest], dtype=torch.int64)
        if self.root_device.type != "cpu":
            digests, own = [d.to(self.root_device) for d in digests], own.to(self.root_device)
        torch.distributed.all_gather(digests, own)
        others = [rank for rank, other in enumerate(digests) if other.item() != digests[0].item()]
        if others:
            plan_0, plan_other = self.broadcast(mine, 0), self.broadcast(mine, others[0])
            raise MisconfigurationException(
                f"ranks 0 and {others[0]} were started with different plans ({len(others)} of {self.world_size} ranks "
                f"differ from rank 0): {plan_0} against {plan_other}; start every rank with the same script and options"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One replica per A rank; F ranks look like the first one until their loader is replaced."""
        worker = self.layout.worker_of(self.global_rank)
        index = self.layout.index_of(self.global_rank) if worker.role == "A" else 0
        return {"num_replicas": self.layout.attention, "rank": index}

    # -- failure --------------------------------------------------------------------------------------------------

    def guarded(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run what talks to other ranks; where one of them failed first, raise its reason, not a broken connection."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            cause = self._report_failure(error)
            if cause is error:
                raise
            raise cause from error

    @property
    def leaves_alone(self) -> bool:
        """Whether an exception ends this rank, of which the others know nothing: they will not meet it anywhere."""
        return self._failed

    @override
    def on_exception(self, exception: BaseException) -> None:
        """A failure outside of a step (a hook, a callback, Ctrl+C, sys.exit) ends the other ranks too."""
        self._report_failure(exception)

    def _report_failure(self, error: BaseException) -> BaseException:
        """Tell the others why this rank stops, or learn why another one has; then cut all connections, once."""
        if self._board is None:
            return error
        self._failed = True
        cause = self._board.first_cause(error)
        if cause is error:
            self._board.post(error)
        groups, self._groups = self._groups, None
        if groups is not None:
            self.transport.drop()
        cut_off(groups)  # others may wait in a collective of Lightning's
        self._close_board()
        return cause

    def _activity(self) -> Activity:
        """What this rank is doing, asked for by another thread."""
        return activity_of(None)

    def _close_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            board.close()

    def _drop_groups(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.destroy()

    # -- collectives ----------------------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if not torch.distributed.is_initialized() or self.leaves_alone:
            return
        ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        self.guarded(torch.distributed.barrier, device_ids=ids)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not torch.distributed.is_initialized() or self.leaves_alone:
            return obj
        box = [obj]
        self.guarded(torch.distributed.broadcast_object_list, box, src=src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the data replicas of this rank's group; an F rank, which has no data of its own, gets its value back."""
        if not isinstance(tensor, Tensor) or self._groups is None or group is JOINED or self.leaves_alone:
            return tensor
        if group is None and self.layout.worker_of(self.global_rank).role == "F":
            return tensor
        group = self._groups.replicas if group is None else group
        sync = namespace_of(self).fabric("utilities.distributed")._sync_ddp_if_available
        return self.guarded(sync, tensor, group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks."""
        if not torch.distributed.is_initialized() or self.leaves_alone:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        self.guarded(torch.distributed.all_reduce, votes)
        return int(votes.item()) == self.world_size if all else bool(votes.item())

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self._move_owned(self.lightning_module)

    def _move_owned(self, module: torch.nn.Module) -> None:
        """Move what this rank owns; parameters on the meta device belong to other ranks and stay there."""
        device = self.root_device
        module._apply(lambda tensor: tensor if tensor.device.type == "meta" else tensor.to(device))
        module._device = device  # type: ignore[assignment]

    # -- end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """As Lightning's, without moving the module: parameters of other ranks have no storage to move."""
        self._close_board()
        self._drop_groups()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
