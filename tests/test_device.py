"""What the host asks of a device is a copy and an event; on a CPU it is there at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_afd.device import HostValues, padded_places_of, places_of
from lightning_afd.expert_map import ExpertMap
from lightning_afd.model import routing
from lightning_afd.model.coroutine import Host
from lightning_afd.model.routing import FullRouter, Router, Routing

CPU = torch.device("cpu")


class OnDevice:
    """Stands for a tensor on a GPU whose work is done when somebody waits for the event behind it."""

    is_cuda, shape, dtype = True, torch.Size([2]), torch.int64


class FakeCuda:
    """Pinned memory, copies and events that write down what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.done = False
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)

    def empty(self, shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Any:
        self.log.append("pinned" if pin_memory else "pageable")
        return self

    def copy_(self, source: Any, *, non_blocking: bool = False) -> None:
        self.log.append("copy" if non_blocking else "blocking copy")

    def record(self) -> None:
        self.log.append("record")

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.log.append("wait")
        self.done = True

    def tolist(self) -> list[int]:
        assert self.done, "read before the copy has ended"
        return [3, 4]


def test_values_are_copied_into_pinned_memory_and_waited_for_by_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    values = HostValues(OnDevice())  # type: ignore[arg-type]
    assert not values.are_there() and values.mark is fake
    assert values.wait() == [3, 4] and values.are_there()
    assert fake.log == ["pinned", "copy", "record", "wait"]


def test_on_a_cpu_values_are_there() -> None:
    values = HostValues(torch.tensor([1.5, 2.0]))
    assert values.are_there() and values.mark is None and values.wait() == [1.5, 2.0]
    assert HostValues(torch.tensor(True)).wait() is True


def test_a_doubt_is_settled_at_once_or_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    host.refuse_if(torch.tensor(False), ValueError("no"))
    with pytest.raises(ValueError, match="at once"):
        host.refuse_if(torch.tensor(True), ValueError("at once"))
    host.settle()
    monkeypatch.setattr(HostValues, "are_there", lambda self: False)
    for wrong in (False, True, True):
        host.refuse_if(torch.tensor(wrong), ValueError("the first" if wrong else "no"))
    with pytest.raises(ValueError, match="the first"):
        host.settle()
    host.settle()


def test_routing_begins_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "places_of", padded_places_of)
    monkeypatch.setattr(HostValues, "wait", lambda self: pytest.fail("waited for the device"))
    monkeypatch.setattr(Tensor, "tolist", lambda self: pytest.fail("waited for the device"))
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("waited for the device"))
    monkeypatch.setattr(Tensor, "nonzero", lambda self, **kwargs: pytest.fail("waited for the device"))
    expert_map, idx_TK = ExpertMap.contiguous(4, 2), torch.tensor([[0, 1], [1, 3]])
    for dedup in (True, False):
        assert isinstance(Router(expert_map, 2, CPU, dedup=dedup).begin(idx_TK), Routing)
    full = FullRouter(expert_map, 2, CPU).begin(idx_TK)
    assert full.is_counted and full.mark is None
    assert full.finish().counts == (2, 2)


def test_places_are_those_of_nonzero_and_zeros_behind_them() -> None:
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.3
    places, padded = places_of(mask, 120), padded_places_of(mask, 120)
    assert torch.equal(places, mask.nonzero()) and padded.shape == (120, 2)
    assert torch.equal(padded[: len(places)], places) and not padded[len(places) :].any()


def test_routes_are_the_same_on_devices_that_are_not_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    idx_TK = torch.rand(50, 8, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :3]
    router = Router(ExpertMap.contiguous(8, 3), 3, CPU, shared=True)
    route = router.route(idx_TK)
    monkeypatch.setattr(routing, "places_of", padded_places_of)
    other = router.route(idx_TK)
    assert route.counts == other.counts
    assert torch.equal(route.token_C, other.token_C) and torch.equal(route.idx_CK, other.idx_CK)


def test_a_full_route_sends_each_token_everywhere_and_only_its_own_slots_count() -> None:
    expert_map, idx_TK = ExpertMap.contiguous(4, 2), torch.tensor([[0, 1], [1, 3]])
    route = FullRouter(expert_map, 2, CPU, shared=True).route(idx_TK)
    assert route.token_C.tolist() == [0, 1, 0, 1]
    assert route.idx_CK[:, :2].tolist() == [[0, 1], [1, -1], [-1, -1], [-1, 1]]
    assert (route.idx_CK[:, 2] == 0).int().tolist() == [1, 0, 0, 1]  # token 1, whose ranks take turns, is the second's
    assert route.idx_CK.dtype == torch.int32 and route.token_C.dtype == torch.int64
