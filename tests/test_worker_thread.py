"""Backward and recompute in another thread, as on GPUs, where autograd has one of its own: nothing is sent or switched.

CPU backwards run in the thread that asks for them. Here each is asked for in a new thread, which has no coroutine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import greenlet
import pytest
import torch
from local_job import LocalJob, make_batches, plain_step
from tiny import tiny
from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.model.coroutine import Coroutine, Host
from lightning_afd.model.port import Port
from lightning_afd.placement import Layout
from lightning_afd.transport.link import Link


def elsewhere(function: Callable[..., Any], threads: list[int]) -> Callable[..., Any]:
    """The function, run in a new thread each time; what it raises is raised here."""

    def run(*args: Any, **kwargs: Any) -> Any:
        answer: list[Any] = []

        def work() -> None:
            threads.append(threading.get_ident())
            try:
                answer.extend((function(*args, **kwargs), None))
            except BaseException as error:
                answer.extend((None, error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        result, error = answer
        if error is not None:
            raise error
        return result

    return run


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that backwards have run in."""
    found: list[int] = []
    for name in ("backward", "grad"):
        monkeypatch.setattr(torch.autograd, name, elsewhere(getattr(torch.autograd, name), found))
    return found


def model_of() -> nn.Module:
    return tiny(aux=0.1, shared_expert=True, layers=3, hidden=8, expert_width=4).double()


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize(("groups", "order"), [(1, "af-pipe"), (2, "zero-bubble")])
def test_backward_in_another_thread_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, threads: list[int], recompute: str, groups: int, order: str
) -> None:
    here, calls = threading.get_ident(), []
    port, send = Port._run, Link.send_all

    def noting(self: Port, *args: Any) -> Any:
        calls.append((threading.get_ident() == here, self._cut.host.in_backward))
        return port(self, *args)

    def sending(self: Link, *args: Any) -> None:
        assert threading.get_ident() == here
        send(self, *args)

    model, batches = model_of(), make_batches(2, 3)
    want = plain_step(model, batches)
    layout = Layout(attention=2, ffn=2, groups=groups)
    splits = order == "zero-bubble" and recompute == "none"
    job = LocalJob(model, layout, order, recompute=recompute, split_attention=splits)
    monkeypatch.setattr(Port, "_run", noting)
    monkeypatch.setattr(Link, "send_all", sending)
    for _ in range(2):
        assert job.step(batches).difference(*want) < 1e-12
    assert threads and here not in threads
    assert set(calls) == ({(True, False), (False, True)} if recompute == "full" else {(True, False)})


def test_a_port_that_did_not_know_of_backward_would_be_stopped(
    monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    """Without Host.in_backward a recompute would look for its coroutine."""
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Host, "in_backward", never, raising=False)
    job = LocalJob(model_of(), Layout(attention=1, ffn=1), recompute="full")
    with pytest.raises(PlanError, match="was called outside of a training"):
        job.step(make_batches(1, 2))


def test_no_coroutine_can_be_resumed_in_another_thread() -> None:
    """What would happen to a port that switched there."""
    host = Host()
    coroutine = Coroutine(host, lambda: coroutine.suspend("layer", torch.Size([1])), torch.enable_grad)
    coroutine.resume()
    with pytest.raises((greenlet.error, ValueError), match="different thread"):
        elsewhere(coroutine.resume, [])(torch.zeros(1))
    coroutine.close()
