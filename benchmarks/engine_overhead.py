"""Time of the engine's own work per action: coroutines, routing, headers, copies; no attention, experts or network.

All ranks of a job run one step inside this process and their messages are recorded. Then one A rank and one F rank
repeat the step alone against the recorded messages, with layers and experts that do nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_afd import attention_rank
from lightning_afd.engine import Engine
from lightning_afd.placement import Layout
from lightning_afd.plan import make_plan
from lightning_afd.segments import Gradients, MicroBatch, UserStep
from lightning_afd.transport.base import Channel
from lightning_afd.transport.local import LocalNetwork, LocalTransport

CPU = torch.device("cpu")
HIDDEN, TOP_K, EXPERTS = 8, 2, 8
Message = tuple[Channel, int, int, int]
"""Channel, sender, receiver, tag."""


class Experts(nn.Module):
    """Weights by which the engine recognises experts; they are never used."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 2, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 1))

    def forward(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor) -> Tensor:
        return torch.zeros_like(x_TH)


class Layer(nn.Module):
    """Routes each token to the same experts in every call."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.experts = Experts()
        self.idx_TK = torch.arange(tokens * TOP_K).reshape(tokens, TOP_K) % EXPERTS
        self.w_TK = torch.full((tokens, TOP_K), 1 / TOP_K)

    def forward(self, h_TH: Tensor) -> Tensor:
        return h_TH + self.experts(h_TH, self.idx_TK, self.w_TK)


class Model(nn.Module):
    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(tokens) for _ in range(layers))
        self.h_TH = torch.zeros(tokens, HIDDEN)

    def forward(self) -> Tensor:
        h_TH = self.h_TH
        for layer in self.layers:
            h_TH = layer(h_TH)
        return h_TH.new_zeros(())


class BareMicroBatch(MicroBatch):
    """The coroutine of a micro-batch without any autograd."""

    def forward(self, layer: int, y_TH: Tensor | None, base_TH: Tensor | None) -> Any:
        self._coroutine.resume(y_TH)
        if layer == 0:
            x_TH = self._coroutine.segment.x_TH
            assert x_TH is not None
            self._bare = Gradients(x_TH, x_TH)
        return None if layer == self._layers else self._coroutine.segment

    def tail_backward(self) -> Gradients:
        return self._bare

    def backward(self, layer: int, dx_TH: Tensor, dw_TK: Tensor, dh_TH: Tensor) -> Gradients | None:
        return self._bare if layer else None


class BareShard:
    """Experts that return what they get."""

    def forward(self, x_TH: Tensor, idx_TK: Tensor, w_TK: Tensor, keep: bool = True) -> tuple[Tensor, Any]:
        return x_TH, w_TK

    def backward(self, saved: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor, Any]:
        return dy_TH, saved, saved

    def weight_gradient(self, pending: Any) -> None:
        pass

    def zero_missing_gradients(self) -> None:
        pass


class Recording(LocalNetwork):
    """Keeps every message that a rank received."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.messages: dict[Message, Tensor] = {}

    def take(self, channel: Channel, sender: int, receiver: int, tag: int) -> Tensor:
        message = super().take(channel, sender, receiver, tag)
        self.messages[channel, sender, receiver, tag] = message
        return message


class Replay:
    """A transport on which all messages have arrived already and sends go nowhere."""

    def __init__(self, recording: Recording, rank: int) -> None:
        self._messages, self._rank = recording.messages, rank

    def post(self, channel: Channel, peer: int, tag: int, nbytes: int) -> Replay.Arrived:
        return self.Arrived(self._messages[channel, peer, self._rank, tag])

    def send(self, channel: Channel, peer: int, tag: int, message: Tensor) -> None:
        pass

    def release(self, micro_batch: int | None = None, *, but: str = "") -> None:
        pass

    class Arrived:
        def __init__(self, message: Tensor) -> None:
            self._message = message

        def wait(self) -> Tensor:
            return self._message


class Job:
    """All ranks of a layout with models that do nothing."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        layout = Layout(attention=options.attention, ffn=options.ffn)
        self.network = Recording(layout)
        self.engines, self.models = [], []
        for rank in range(layout.world):
            model, transport = Model(options.layers, options.tokens), LocalTransport(self.network, rank)
            plan, layers = make_plan(model, layout, order=options.order, micro_batches=options.micro_batches)
            engine = Engine(plan, rank, transport, transport)
            engine.place(model, layers)
            engine.connect(model, layers, CPU)
            if engine.experts is not None:
                engine.experts._shards = dict.fromkeys(range(options.layers), BareShard())
            self.engines.append(engine)
            self.models.append(model)

    def step(self, rank: int) -> None:
        engine, model, count = self.engines[rank], self.models[rank], self.options.micro_batches
        step = UserStep(function=model, around=nullcontext)
        engine.run([step] * count if engine.is_attention else [], count, training=True)

    def record(self) -> None:
        """Two steps, so that buffers are as large as they need to be."""
        for _ in range(2):
            self.network.messages.clear()
            self.network.run([lambda rank=rank: self.step(rank) for rank in range(len(self.engines))])

    def replay(self, rank: int, steps: int) -> tuple[dict[str, float], float, float]:
        """Median microseconds per kind of action, of all actions, and of the whole step divided by its actions."""
        engine = self.engines[rank]
        engine.link._transport = Replay(self.network, rank)
        recorded = engine._step
        kinds, totals = defaultdict(list), []
        for _ in range(steps):
            engine._step = recorded - 1  # headers carry the number of the recorded step
            start = time.perf_counter()
            self.step(rank)
            totals.append((time.perf_counter() - start) * 1e6 / len(engine.runtime.spans))
            for span in engine.runtime.spans:
                kinds[span.action.op + span.action.phase].append(span.seconds * 1e6)
        everything = statistics.median(micros for times in kinds.values() for micros in times)
        return {kind: statistics.median(times) for kind, times in kinds.items()}, everything, statistics.median(totals)


@contextmanager
def without_computation() -> Iterator[None]:
    with mock.patch.object(attention_rank, "MicroBatch", BareMicroBatch), torch.no_grad():
        yield


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=int, default=1, help="A ranks: messages per action of the F rank")
    parser.add_argument("--ffn", type=int, default=1, help="F ranks: messages per action of the A rank")
    parser.add_argument("--tokens", type=int, default=4, help="tokens per micro-batch")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--order", default="af-pipe")
    parser.add_argument("--steps", type=int, default=50, help="repetitions")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    job = Job(options)
    with without_computation():
        job.record()
        for rank in (0, options.attention):
            kinds, median, whole = job.replay(rank, options.steps)
            cells = "  ".join(f"{kind} {micros:.0f}" for kind, micros in kinds.items())
            text = (
                f"{job.engines[rank].worker}: median {median:.0f} us per action ({cells}), whole step {whole:.0f} each"
            )
            print(text)  # noqa: T201


if __name__ == "__main__":
    main()
