"""DeepSpeedCPUAdam trains as AdamW does, with parts in the host's memory.

Each case runs with a stand-in, and with the optimizer itself where DeepSpeed is installed.
"""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fits import Run, State
from lightning.pytorch.core.optimizer import LightningOptimizer
from pool import RankPool
from sharding_cases import Case, Result, engines, fit, needs_deepspeed, same
from torch import nn

from lightning_afd.namespace import MisconfigurationException
from lightning_afd.strategies import refusals
from lightning_afd.strategies.deepspeed_zero import keep_native_half
from lightning_afd.strategies.refusals import refuse_optimizer

RUN = Run(layout="2A+1F")


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """Has the name of DeepSpeed's optimizer for the host's memory, and counts steps in an int as that one does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """AdamW's."""
        for state in self.state.values():
            state["step"] = torch.tensor(float(state["step"]))
        super().step(closure)
        for state in self.state.values():
            state["step"] = int(state["step"])


def _fit_on_host(
    sharding: str, paths: dict[str, Path], optimizer: type[torch.optim.Optimizer] = DeepSpeedCPUAdam
) -> list[Result]:
    """Six steps, those from the third on resumed, and resumed with a plain optimizer; with CPU for CUDA."""
    host = Case(sharding=sharding, optimizer=optimizer, scheduler="lambda")
    plain = Case(sharding="none", scheduler="lambda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals, "_refuse_host_adam", lambda *_: None)
        return [
            *fit(RUN, [plain], paths["plain"]),
            *fit(RUN, [host], paths["host"]),
            *fit(RUN, [host], None, paths["host"]),
            *fit(RUN, [host], None, paths["plain"]),
            *fit(RUN, [plain], None, paths["host"]),
        ]


@engines
def test_state_in_the_memory_of_the_host(pool: RankPool, tmp_path: Path, sharding: str) -> None:
    """Every rank has flat parts then, FFN ranks of their own experts; checkpoints are those of any other optimizer."""
    paths = {name: tmp_path / f"{name}.ckpt" for name in ("plain", "host")}
    ranks = pool.run(_fit_on_host, RUN.world, sharding, paths, timeout=200)
    for plain, *others in ranks:
        assert all(same(plain.weights, other.weights) for other in others)
    for rank, parts in ((0, 2), (1, 2), (2, 1)):
        plain, host = ranks[rank][:2]
        assert host.names == ["DeepSpeedCPUAdam"] * 2 and abs(host.kept - plain.kept / parts) <= 2 * 4


def _groups_behind_fits() -> list[int]:
    """How many process groups this rank has behind each of two fits."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals, "_refuse_host_adam", lambda *_: None)
        for _ in range(2):
            fit(RUN, [Case(sharding="stand-in", optimizer=DeepSpeedCPUAdam)])
            counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_a_fit_leaves_no_process_groups(pool: RankPool) -> None:
    """That of an FFN rank alone included: there is the default group only."""
    assert pool.run(_groups_behind_fits, RUN.world) == [[1, 1]] * RUN.world


def _fit_with_operator(paths: dict[str, Path]) -> list[Result]:
    """First without division."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam as Native

    whole = Case(sharding="none", optimizer=Native, scheduler="lambda")
    return [*fit(RUN, [whole]), *_fit_on_host("deepspeed", paths, Native)]


@needs_deepspeed
def test_operator_of_deepspeed(pool: RankPool, tmp_path: Path) -> None:
    """Its arithmetic is not AdamW's to the last bit."""
    paths = {name: tmp_path / f"{name}.ckpt" for name in ("plain", "host")}
    for whole, plain, host, resumed, *others in pool.run(_fit_with_operator, RUN.world, paths, timeout=300):
        assert same(host.weights, resumed.weights) and host.rates == plain.rates
        assert all(_near(host.weights, other.weights) for other in (whole, plain, *others))


def _near(one: State, other: State) -> bool:
    """Rates are 1e-2: after six steps no number is further off than float32 rounds."""
    return one.keys() == other.keys() and all(torch.allclose(one[n], other[n], rtol=0, atol=2e-6) for n in one)


class WithNativeHalf(torch.optim.SGD):
    """Has a number in a table of C++, and deletes that as DeepSpeedCPUAdam does."""

    def __init__(self, table: list[int]) -> None:
        super().__init__(nn.Linear(1, 1).parameters(), lr=0.1)
        self.opt_id, self.ds_opt_adam = 7, SimpleNamespace(destroy_adam=table.remove)

    def __del__(self) -> None:
        """DeepSpeed's."""
        self.ds_opt_adam.destroy_adam(self.opt_id)


@pytest.mark.parametrize("kept", [True, False])
def test_wrappers_of_lightning_leave_the_native_half(kept: bool) -> None:
    table = [7]
    optimizer = WithNativeHalf(table)
    wrapper = LightningOptimizer(optimizer)
    for _ in range(2 * kept):
        keep_native_half(optimizer)
    del wrapper
    gc.collect()
    assert table == ([7] if kept else [])
    if not kept:
        table.append(7)
    del optimizer
    gc.collect()
    assert table == []


@pytest.mark.parametrize(
    ("sharding", "device", "said"),
    [
        (
            "deepspeed",
            "cpu",
            "of CUDA devices in the host's memory, and this run computes on the cpu: return torch.opt",
        ),
        ("torch", "cuda", "cannot update parameters on cuda: use optimizer_sharding='deepspeed', which keeps its"),
        ("none", "cuda", "cannot update parameters on cuda: use optimizer_sharding='deepspeed', which keeps its"),
        ("none", "cpu", ""),
        ("torch", "cpu", ""),
        ("deepspeed", "cuda", ""),
    ],
)
def test_where_it_is_refused(sharding: Any, device: str, said: str) -> None:
    made = DeepSpeedCPUAdam(nn.Linear(1, 1).parameters(), lr=0.1)
    if not said:
        refuse_optimizer(made, "afd", sharding, torch.device(device))
        return
    with pytest.raises(MisconfigurationException, match=said) as caught:
        refuse_optimizer(made, "afd", sharding, torch.device(device))
    assert "\n" not in str(caught.value)
