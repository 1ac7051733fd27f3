"""ZeRO stage 1 of DeepSpeed as the engine of a `FlatOptimizer`: the only place that knows DeepSpeed.

It is given gradients that are reduced and clipped already, so that none of its own reductions, norms, clipping, loss
scales and hooks run. Its names that are used here are not public: the extra `deepspeed` pins the versions.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_afd.namespace import MisconfigurationException

VERSION = "0.19."
"""Of DeepSpeed, as far as names that are not public have been seen to be the same."""
HOST_ADAM = "DeepSpeedCPUAdam"
"""DeepSpeed's class that updates parameters in the host's memory."""
_INSTALL = "run pip install 'lightning-afd[deepspeed]' or use optimizer_sharding='torch'"


def installed_version() -> str | None:
    """Of the package deepspeed, which is not imported for it; None where there is none."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def check_installed() -> None:
    """Raises MisconfigurationException with the command that installs DeepSpeed."""
    version = installed_version()
    if version is None:
        raise MisconfigurationException(
            f"optimizer_sharding='deepspeed' needs the package deepspeed, which is not installed: {_INSTALL}"
        )
    if not version.startswith(VERSION):
        raise MisconfigurationException(
            f"optimizer_sharding='deepspeed' works with deepspeed {VERSION}x, but {version} is installed: {_INSTALL}"
        )


def keep_native_half(optimizer: Any) -> None:
    """Let what a DeepSpeedCPUAdam has in C++ live as long as the optimizer; others stay as they are.

    Lightning wraps an optimizer in an object of a subclass that looks up all attributes in it. Each wrapper that is
    dropped, one at least in every set-up, would delete by DeepSpeed's `__del__` what the optimizer still needs, and its
    next step would end the process.
    """
    operator = getattr(optimizer, "ds_opt_adam", None)
    if operator is not None:
        optimizer.ds_opt_adam = SimpleNamespace(**{**vars(operator), "destroy_adam": lambda number: None})
        weakref.finalize(optimizer, operator.destroy_adam, optimizer.opt_id).atexit = False


class ZeroParts:
    """The parts of one optimizer; with `offload` they lie in the host's memory, with their state and master weights."""

    def __init__(self, optimizer: Optimizer, group_of: Callable[[], Any], *, offload: bool) -> None:
        self.optimizer = optimizer
        self._group_of = group_of
        self._offload = offload
        self._stale = offload
        """Whether the host's master weights are older than the model's."""
        self.rank = torch.distributed.get_rank(group_of())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _import_for(parameters[0].device)
        with _without_new_attributes(parameters), _quiet():
            self._zero = _open(optimizer, self.group, offload)
        for hook in self._zero._grad_acc_hooks:
            hook.remove()
        self._zero._hp_optimizer_states_linked = True  # by the attributes of parameters that were removed
        self._disconnect()
        if not offload:
            self._share_weights()

    @property
    def group(self) -> Any:
        """Asked for each time: after a failure a reference would keep connections open."""
        return self._group_of()

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update this rank's parts and exchange them."""
        with self._connected() as zero:
            if self._stale:
                zero.refresh_fp32_params()
                self._stale = False
            for number, gradient in enumerate(gradients):
                if self._offload:
                    zero.single_partition_of_fp32_groups[number].grad.copy_(gradient)
                else:
                    zero.averaged_gradients[number] = [gradient]
            zero.step()

    def load(self, number: int, state: dict[str, Any]) -> None:
        """Take the state of a part, and the weights as they are at the next step."""
        (part,) = self.optimizer.param_groups[number]["params"]
        if "step" in state and type(self.optimizer).__name__ == HOST_ADAM:
            state["step"] = int(state["step"])
        self.optimizer.state.pop(part, None)
        if state:
            self.optimizer.state[part] = state
        self._stale = self._offload

    def _share_weights(self) -> None:
        """Float32 weights need no second copy as master weights; what is loaded into them needs no copying either."""
        zero = self._zero
        pairs = zip(zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups, strict=True)
        for master, parts in pairs:
            master.data = parts[self.rank].data

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        zero, group = self._zero, self.group
        zero.dp_process_group = group
        zero.real_dp_process_group = [group] * len(zero.bit16_groups)
        try:
            yield zero
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        self._zero.dp_process_group = None
        self._zero.real_dp_process_group = []


def _open(optimizer: Optimizer, group: Any, offload: bool) -> Any:
    """DeepSpeed's optimizer around the user's; moves the parameters into flat tensors."""
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils.timer import NoopTimer

    parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    host = DeepSpeedZeroOffloadOptimizerConfig(device="cpu", pin_memory=parameters[0].device.type == "cuda")
    return DeepSpeedZeroOptimizer(
        optimizer,
        {parameter: str(number) for number, parameter in enumerate(parameters)},
        NoopTimer(),
        {},
        partition_grads=False,
        contiguous_gradients=False,
        communication_data_type=torch.float32,
        dp_process_group=group,
        offload_optimizer_config=host if offload else None,
        clip_grad=0.0,
        check_grad_overflow=False,
        compute_grad_norm=offload,  # DeepSpeed wants it there; it is that of no gradients
    )


def _import_for(device: torch.device) -> None:
    """Import DeepSpeed for the device of this run, and let it use the process groups that there are."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # it would choose a GPU that a run on the CPU leaves alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute the name is PyTorch
        from deepspeed.accelerator import get_accelerator
        from deepspeed.comm import comm
    chosen = get_accelerator().device_name()
    if chosen.split(":")[0] != device.type:
        raise MisconfigurationException(
            f"DeepSpeed was set up for {chosen}, and this run computes on {device.type}: set "
            f"DS_ACCELERATOR={device.type} in the environment of every rank"
        )
    if comm.cdb is None:
        # It would compile, for minutes, an operator for sums in shared memory that training never uses.
        build, backend.build_shm_op = backend.build_shm_op, lambda: None
        try:
            with _quiet():
                comm.init_distributed(torch.distributed.get_backend(), verbose=False)
        finally:
            backend.build_shm_op = build


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DeepSpeed's lines about each buffer."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _without_new_attributes(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Take from parameters what DeepSpeed hangs on them: process groups, so that they could not be pickled."""
    before = [set(vars(parameter)) for parameter in parameters]
    yield
    for parameter, names in zip(parameters, before, strict=True):
        for name in set(vars(parameter)) - names:
            delattr(parameter, name)
