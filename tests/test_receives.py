"""Buffers are offered before they are needed: a message of several groups can travel while its receiver computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from local_job import LocalJob, make_batches, plain_step
from tiny import tiny

from lightning_afd.engine import Engine
from lightning_afd.placement import Layout, Worker
from lightning_afd.receives import AHEAD, Receives
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.passes import channel_of
from lightning_afd.schedule.shape import Shape
from lightning_afd.transport.base import name_of

Log = list[tuple[str, Action]]
"""What a rank did in one step: ("post", "send" or "do", action); it does what it computes and what it waits for."""
MODEL: dict[str, Any] = {"aux": 0.1, "layers": 4, "hidden": 8, "expert_width": 4}
LAYOUTS = [
    Layout(attention=1, ffn=1),
    Layout(attention=1, ffn=1, head="ffn"),
    Layout(attention=2, ffn=1, groups=2),
    Layout(attention=1, ffn=1, groups=2, head="ffn"),
    Layout.together(2),
]


def logs_of(layout: Layout, order: str) -> tuple[Shape, list[Log]]:
    """What each rank did in a second step, whose sizes are known from the first one."""
    job, batches = LocalJob(tiny(**MODEL).double(), layout, order), make_batches(layout.attention, 5)
    job.step(batches)
    logs = [recorded(engine) for engine in job.engines]
    job.step(batches)
    return job.engines[0].plan.shape(5), logs


def recorded(engine: Engine) -> Log:
    """The list into which a rank writes from now on."""
    log: Log = []
    post = engine._transport.post

    def noted(channel: Any, peer: int, tag: int, nbytes: int) -> Any:
        log.append(("post", Action.parse(name_of(channel, tag))))
        return post(channel, peer, tag, nbytes)

    def noting(worker: Worker, handler: Callable[[Action], None]) -> Callable[[Action], None]:
        def noted(action: Action) -> None:
            sends = action.is_transfer and not engine.plan.shape(1).receives(worker, action)
            log.append(("send" if sends else "do", action))
            handler(action)

        return noted

    engine._transport.post = noted  # type: ignore[method-assign]
    tables = engine.runtime._tables
    engine.runtime._tables = {
        worker: {key: noting(worker, handler) for key, handler in table.items()} for worker, table in tables.items()
    }
    return log


def late(log: Log) -> list[Action]:
    """Messages that had no buffer yet when the computation in front of them began."""
    received = {action for what, action in log if what == "post"}
    posted: set[Action] = set()
    before: set[Action] | None = None
    too_late = []
    for what, action in log:
        if what == "post":
            posted.add(action)
        elif what == "send":
            continue
        elif not action.is_transfer:
            before = set(posted)
        elif action in received and before is not None and action not in before:
            too_late.append(action)
    return too_late


@pytest.mark.parametrize("order", ["sequential", "zero-bubble"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_buffers_are_there_before_the_computation_in_front_of_a_message(layout: Layout, order: str) -> None:
    shape, logs = logs_of(layout, "flowmoe" if layout.collocated and order == "zero-bubble" else order)
    for log in logs:
        assert not late(log)
        posts, waits = orders(shape, log)
        assert len(posts) >= 2 and posts == waits


def orders(shape: Shape, log: Log) -> tuple[dict[Any, list[Action]], dict[Any, list[Action]]]:
    """Messages of each channel in the order of posts, and in that in which they were waited for."""
    posts, waits = defaultdict(list), defaultdict(list)
    received = {action for what, action in log if what == "post"}
    for what, action in log:
        if action in received and what != "send":
            found = (posts if what == "post" else waits)[channel_of(shape, action)]
            found += [] if action in found else [action]  # one post per sender
    return posts, waits


def test_a_post_for_when_it_is_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazily(self: Receives, action: Action) -> Any:
        return [self._link.post(action, peer) for peer in self._peers.senders(action)]

    monkeypatch.setattr(Receives, "_post_until", lambda self, end: None)
    monkeypatch.setattr(Receives, "take", lazily)
    _, logs = logs_of(Layout(attention=1, ffn=1, groups=2), "zero-bubble")
    assert all(late(log) for log in logs)


def test_few_buffers_are_held_at_a_time() -> None:
    _, logs = logs_of(Layout(attention=1, ffn=1, groups=2), "sequential")
    for log in logs:
        received = {action for what, action in log if what == "post"}
        first = next(number for number, (what, _) in enumerate(log) if what == "do")
        assert AHEAD < first < len(received) / 2


def test_a_channel_grows_with_its_messages() -> None:
    """Sums come in buffers of an agreed size, with room for other micro-batches."""
    model = tiny(**MODEL).double()
    job = LocalJob(model, Layout(attention=1, ffn=2, groups=2), "af-pipe")
    for longer in (0, 0, 6, 2):
        batches = make_batches(1, 3, longer=longer)
        assert job.step(batches).difference(*plain_step(model, batches)) < 1e-12
