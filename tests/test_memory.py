"""What a micro-batch no longer needs is freed at once, not at the end of the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_job import LocalJob, make_batches, step_of
from tiny import tiny
from torch import Tensor, nn

from lightning_afd.model.experts import ExpertShard
from lightning_afd.placement import Layout
from lightning_afd.schedule.actions import Action
from lightning_afd.segments import MicroBatch, UserStep
from lightning_afd.transport.local import _LocalIncoming

LAYOUT = Layout(attention=1, ffn=1)


class Alive:
    """Weak references to tensors, by the micro-batch or layer that made them."""

    def __init__(self) -> None:
        self._references: dict[str, list[weakref.ref[Tensor]]] = {}

    def watch(self, name: str, *tensors: Tensor | None) -> None:
        found = [weakref.ref(tensor) for tensor in tensors if tensor is not None]
        self._references.setdefault(name, []).extend(found)

    def count(self, name: str = "") -> int:
        """Those that still exist, of all names that start with `name`."""
        return sum(r() is not None for key, all_ in self._references.items() if key.startswith(name) for r in all_)

    def watched(self) -> int:
        return sum(map(len, self._references.values()))


def before(job: LocalJob, rank: int, action: str, call: Callable[[], Any]) -> None:
    """Let `call` run on a rank just before it executes an action."""
    handlers: Any = job.engines[rank].runtime._tables[job.engines[rank].worker]
    wanted = Action.parse(action)
    handler = handlers[wanted.op, wanted.phase]

    def first_call(action: Action) -> None:
        if action == wanted:
            call()
        handler(action)

    handlers[wanted.op, wanted.phase] = first_call


def watch_segments(alive: Alive, patch: pytest.MonkeyPatch) -> None:
    forward = MicroBatch.forward

    def watching(self: MicroBatch, layer: int, y_TH: Tensor | None, base_TH: Tensor | None) -> Any:
        segment = forward(self, layer, y_TH, base_TH)
        kept = self._segments[layer]
        alive.watch(
            f"segment {layer}", kept.h, kept.base, kept.x_TH, kept.idx_TK, kept.w_TK, *(p[0] for p in kept.logits)
        )
        return segment

    patch.setattr(MicroBatch, "forward", watching)


def watch_messages(alive: Alive, patch: pytest.MonkeyPatch) -> None:
    wait = _LocalIncoming.wait

    def watching(self: _LocalIncoming) -> Tensor:
        message = wait(self)
        vars(self)["buffer"] = message  # a real network's receive holds the buffer that was posted
        channel, _, receiver, _ = self._key
        alive.watch(f"message to {receiver} on {channel}", message)
        return message

    patch.setattr(_LocalIncoming, "wait", watching)


def watch_experts(alive: Alive, patch: pytest.MonkeyPatch) -> None:
    forward, backward = ExpertShard.forward, ExpertShard.backward

    def watching_forward(self: ExpertShard, *args: Any, **kwargs: Any) -> Any:
        y_TH, saved = forward(self, *args, **kwargs)
        alive.watch("saved", saved._payload.x_TH, saved._payload.z_RZ, saved._payload.w_TK)
        return y_TH, saved

    def watching_backward(self: ExpertShard, *args: Any) -> Any:
        dx_TH, dw_TK, pending = backward(self, *args)
        alive.watch("pending", pending._payload.h_RD, pending._payload.dz_RZ, pending._payload.dy_TH)
        return dx_TH, dw_TK, pending

    patch.setattr(ExpertShard, "forward", watching_forward)
    patch.setattr(ExpertShard, "backward", watching_backward)


def logits_step(model: nn.Module, ids: Tensor, alive: Alive) -> UserStep:
    """A step that lets us see the user's own logits, which its backward needs."""

    def step() -> Tensor:
        out = model(ids)
        alive.watch("logits", out.logits)
        loss = out.logits.square().mean()
        return loss if out.aux_loss is None else loss + out.aux_loss

    return step_of(step, 0.5)


def test_attention_rank_frees_a_micro_batch_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, seen = Alive(), []
    watch_segments(alive, monkeypatch)
    watch_messages(alive, monkeypatch)
    job = LocalJob(tiny(layers=2, aux=0.1), LAYOUT, "sequential")
    before(job, 0, "A2b0", lambda: seen.append((alive.count("segment"), alive.count("logits"))))
    before(job, 0, "A0b0", lambda: seen.append(tuple(alive.count(f"segment {layer}") for layer in (0, 1, 2))))
    before(job, 0, "A0f1", lambda: seen.append((alive.watched(), alive.count())))
    first, second = make_batches(1, 2)[0]
    job.run([[logits_step(job.models[0], first, alive), logits_step(job.models[0], second, alive)]])
    (segments, logits), by_layer, (watched, left) = seen
    assert segments >= 6 and logits == 1  # the references do see what is alive
    assert by_layer[0] >= 4 and by_layer[1:] == (0, 0)  # layer by layer
    assert watched > 20 and left == 0
    assert alive.count() == 0


def test_attention_rank_frees_answers_once_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, seen = Alive(), []
    watch_messages(alive, monkeypatch)
    job = LocalJob(tiny(layers=2), LAYOUT, "layer-major")
    for action in ("A1f0", "A2f0", "A1b0", "A0b0", "A0b1"):
        before(job, 0, action, lambda: seen.append(alive.count("message to 0")))
    job.step(make_batches(1, 2))
    assert seen == [0] * 5 and alive.watched() == 32  # announced and sent


def test_ffn_rank_frees_activations_with_the_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, seen = Alive(), []
    watch_experts(alive, monkeypatch)
    watch_messages(alive, monkeypatch)
    job = LocalJob(tiny(layers=2), LAYOUT, "sequential")
    for action in ("E1b0", "E1w0", "D0b0", "E0w0", "D0f1"):
        before(job, 1, action, lambda: seen.append((alive.count("saved"), alive.count("pending"))))
    before(job, 1, "D0f1", lambda: seen.append((alive.count("message to 1"), 0)))
    job.step(make_batches(1, 2))
    assert seen[0] == (6, 0)  # both layers
    assert seen[1] == (4, 3)  # x of layer 1 is still needed, z and w are not
    assert seen[2:] == [(3, 0), (1, 3), (0, 0), (0, 0)]


def test_evaluation_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, seen = Alive(), []
    watch_segments(alive, monkeypatch)
    watch_messages(alive, monkeypatch)
    job = LocalJob(tiny(layers=3), LAYOUT)
    before(job, 0, "A2f0", lambda: seen.append(alive.count("segment")))
    ids = make_batches(1, 1)[0][0]
    for _ in range(2):
        with torch.no_grad():
            job.run([[logits_step(job.models[0], ids, alive)]], training=False)
    assert alive.watched() > 30 and alive.count() == 0
    assert seen[1] == 4  # those of the last layer
