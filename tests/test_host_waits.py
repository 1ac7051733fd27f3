"""A step asks its tensors for nothing that would keep the host waiting for a GPU, but for the counts of dispatches.

On a CPU nothing has to be waited for, so the operations that would wait are looked for by name. Experts take the
grouped kernel and routing its padded form, as on GPUs.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, user_step
from tiny import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_afd.device import HostValues, padded_places_of
from lightning_afd.model import routing
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.routing import Router
from lightning_afd.placement import Layout
from lightning_afd.transport.ordered import OrderedNetwork

SYNCHRONIZING = (
    *("_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "is_nonzero"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc", "repeat_interleave"),
)
PLACES = ("lightning_afd/", "recipes/", "tests/")


class Waits(TorchDispatchMode):
    """Writes down each operation whose result the host would have to wait for, or that copies a number as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").partition(".")[0]
        indices = args[1] if name.startswith(("index", "_index_put", "_unsafe_index")) and len(args) > 1 else ()
        by_mask = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in (indices or ()) if i is not None)
        if name in SYNCHRONIZING or by_mask or (name == "where" and any(part.dim() == 0 for part in args)):
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if any(place in f.filename for place in PLACES)]
        inner = [f for f in frames if "test_host_waits" not in f.filename]
        self.found.append(f"{what} in {inner[-1].filename.rpartition('/')[2]}:{inner[-1].lineno} ({inner[-1].name})")


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Also Tensor.tolist and numpy, which no operation shows, on anything but what HostValues has brought."""
    waits, wait, tolist = Waits(), HostValues.wait, Tensor.tolist
    allowed = [False]

    def counted(self: HostValues) -> Any:
        allowed[0] = True
        try:
            return wait(self)
        finally:
            allowed[0] = False

    def listed(self: Tensor) -> Any:
        if not allowed[0] and self.numel() and not _is_announced():
            waits.note("tolist")
        return tolist(self)

    with monkeypatch.context() as patch, waits:
        patch.setattr(HostValues, "wait", counted)
        patch.setattr(Tensor, "tolist", listed)
        yield waits


def _is_announced() -> bool:
    """Whether the numbers came from host to host: a header, or what travels with it."""
    return any(
        frame.name in ("read_announcement", "unpack_route", "unpack_hidden") for frame in traceback.extract_stack()
    )


def job_of(layout: Layout, order: str, **choices: Any) -> LocalJob:
    sizes = {"hidden": 16, "expert_width": 8, "layers": 4}
    return LocalJob(tiny(**sizes).bfloat16(), layout, order, network=OrderedNetwork(layout), **choices)


def second_step(monkeypatch: pytest.MonkeyPatch, job: LocalJob) -> list[str]:
    """What a step asks for whose layers have been looked at in a first one."""
    monkeypatch.setattr(ExpertShard, "_use_grouped", lambda self, x_TH: True)
    monkeypatch.setattr(routing, "places_of", padded_places_of)
    batches, layout = make_batches(job.layout.attention, 3), job.layout
    ranks = [rank for rank in range(layout.world) if job.engines[rank].is_attention]
    work = [[user_step(job.models[r], ids, 0.2) for ids in batches[layout.index_of(r)]] for r in ranks]
    tails = [[user_step(job.models[layout.tail_rank(a)], ids, 0.2) for ids in mine] for a, mine in enumerate(batches)]
    job.run(work, tails=tails)
    with watched(monkeypatch) as waits:
        job.run(work, tails=tails)
    assert all(engine.kernels <= {"grouped_mm"} for engine in job.engines)
    return sorted(set(waits.found))


CASES: list[tuple[Layout, str, dict[str, Any]]] = [
    (Layout(attention=2, ffn=2), "af-pipe", {"router_z_loss": 1e-3}),
    (Layout(attention=1, ffn=2, groups=2), "zero-bubble", {"split_attention": True}),
    (Layout(attention=2, ffn=2, groups=2, head="ffn"), "af-pipe", {"recompute": "attention"}),
    (Layout(attention=1, ffn=2), "layer-major", {"recompute": "full", "recompute_experts": True}),
    (Layout(attention=1, ffn=2), "layer-major", {"dedup": False}),
    (Layout(attention=1, ffn=2), "sequential", {"capacity": "full"}),
    (Layout.together(2), "flowmoe", {}),
]


@pytest.mark.parametrize(("layout", "order", "choices"), CASES, ids=str)
def test_a_step_waits_for_nothing_but_counts(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, order: str, choices: dict[str, Any]
) -> None:
    job = job_of(layout, order, **choices)
    for engine in job.engines:
        engine.expert_counts.enabled = True
    assert second_step(monkeypatch, job) == []


def test_other_waits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Router.begin

    def careless(self: Router, idx_TK: Tensor) -> Any:
        int(idx_TK.max())
        idx_TK[idx_TK > 1].sum()
        torch.where(idx_TK > 1, idx_TK, 0)
        idx_TK.unique().tolist()
        return begin(self, idx_TK)

    monkeypatch.setattr(Router, "begin", careless)
    found = second_step(monkeypatch, job_of(Layout(attention=1, ffn=1), "sequential"))
    assert {line.split()[0] for line in found} == {"_local_scalar_dense", "index", "where", "_unique2", "tolist"}
