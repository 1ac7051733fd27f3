"""What messages take of the cores that compute, where the same cores move them (gloo on CPUs).

A thread of the process wakes up for each message and pushes computation aside, so that messages between computations
cost more of a core than messages alone: they are measured between products of matrices, on the clock of the process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lightning_afd.calibrate.links import Mail
from lightning_afd.cost.measured import Handled

SIZES = (2**12, 2**17, 2**20)
"""Bytes of a message."""
MESSAGES = 8
"""In each direction, one behind each computation."""
ROUNDS = 5
WIDTH, PRODUCTS = 256, 4
"""A computation: a millisecond or two of matrix products."""


def measure_handling(mail: Mail, peer: int, cpu: Callable[[], float] = time.process_time) -> list[Handled]:
    """Both ranks call it: CPU seconds that this process spends on a message that it sends or gets, by size."""
    x, w = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH, WIDTH)

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(x, w)

    return [Handled(nbytes=nbytes, seconds=_between(mail, peer, (nbytes, compute), cpu)) for nbytes in SIZES]


def _between(mail: Mail, peer: int, what: tuple[int, Callable[[], None]], cpu: Callable[[], float]) -> float:
    """With messages between computations less without: one after another, as the speed of a core moves."""
    nbytes, compute = what
    message, extra = torch.zeros(nbytes, dtype=torch.uint8), list[float]()
    for _ in range(ROUNDS + 1):
        incoming = [mail.post(peer, nbytes) for _ in range(MESSAGES)]
        start, sent = cpu(), []
        for _ in range(MESSAGES):
            sent.append(mail.send(peer, message))
            compute()
        for work in (*incoming, *sent):
            work.wait()
        middle = cpu()
        for _ in range(MESSAGES):
            compute()
        extra.append((middle - start) - (cpu() - middle))
    return max(0.0, statistics.median(extra[1:])) / (2 * MESSAGES)
