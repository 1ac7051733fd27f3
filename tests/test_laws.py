"""The laws of the pipeline, exactly: P workers with equal stages, F forward, B backward, c transfer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lightning_afd.load import Link, Load, by_kind
from lightning_afd.schedule.fill import Pace
from lightning_afd.schedule.orders import Knobs, build
from lightning_afd.schedule.shape import Shape
from lightning_afd.simulate import simulate

FREE = {"Tf": 0, "Tb": 0, "Tw": 0}
UNIT = 4
"""F: one forward; so quarters of it are whole numbers, and times are exact."""
WHOLE = FREE | {"Af": UNIT, "Ab": 2 * UNIT, "Ef": UNIT, "Eb": 2 * UNIT, "Ew": 0}
"""Equal stages whose backward B = 2F is one action."""
SPLIT = FREE | {kind: UNIT for kind in ("Af", "Ab", "Aw", "Ef", "Eb", "Ew")}
"""The same with weight gradients of their own."""


def load(shape: Shape, seconds: Mapping[str, float], **sizes: float) -> Load:
    """Transfers take `latency`, or occupy lanes for `bytes` (`hop` for the base); a second carries one byte."""
    link = Link(attention=1, ffn=1, latency=sizes.get("latency", 0))
    table = {kind: sizes.get("bytes", 0) for kind in ("Df", "Db", "Cf", "Cb")}
    table |= {kind: sizes.get("hop", 0) for kind in ("Hf", "Hb")}
    return Load(seconds=by_kind(shape, seconds), bytes=by_kind(shape, table), links=dict.fromkeys("DCH", link))


def overhead(
    order: str, shape: Shape, transfer: int, *, lanes: bool = False, hop: int = 0, pending: int = 100
) -> float:
    """Seconds beyond the work of one of equal workers; `lanes`: transfers and hops occupy the NICs of both ends."""
    pace = Pace(seconds={**dict.fromkeys(SPLIT, UNIT), **FREE}, transfer=transfer)
    schedule = build(order, shape, Knobs(pending=pending, pace=pace))
    costs = load(
        shape, SPLIT if shape.split_attention else WHOLE, hop=hop, **{"bytes" if lanes else "latency": transfer}
    )
    return simulate(schedule, costs).seconds - 3 * UNIT * shape.micro_batches * shape.layers // shape.groups


def equal_stages(groups: int, rounds: int, runs: int, *, split: bool) -> Shape:
    return Shape(layers=groups * rounds, groups=groups, micro_batches=4 * groups * runs, split_attention=split)


GRID = [(1, 1, 1), (1, 3, 2), (2, 1, 1), (2, 2, 2), (2, 3, 1), (4, 1, 2), (4, 2, 1)]


@pytest.mark.parametrize(("groups", "rounds", "runs"), GRID)
@pytest.mark.parametrize("transfer", [0, 1, 2, 3, 4])
def test_law_of_af_pipe(groups: int, rounds: int, runs: int, transfer: int) -> None:
    """(P-1)(F+B+2c), exactly, for c <= F."""
    law = (2 * groups - 1) * (3 * UNIT + 2 * transfer)
    shape = equal_stages(groups, rounds, runs, split=False)
    assert overhead("af-pipe", shape, transfer) == law
    if transfer < UNIT:  # with c = F a dispatch of a forward and one of a gradient meet at an F worker
        assert overhead("af-pipe", shape, transfer, lanes=True) == law


@pytest.mark.parametrize(("groups", "rounds", "runs"), [(1, 1, 2), (1, 3, 3), (2, 1, 2), (2, 2, 2), (4, 1, 2)])
@pytest.mark.parametrize("transfer", [0, 1, 2, 3, 4])
def test_law_of_zero_bubble(groups: int, rounds: int, runs: int, transfer: int) -> None:
    """(P-1)(F+c), exactly, for c <= F and R = 2G, 3G ...; for R = G see below."""
    law = (2 * groups - 1) * (UNIT + transfer)
    shape = equal_stages(groups, rounds, runs, split=True)
    assert overhead("zero-bubble", shape, transfer) == law
    if transfer <= UNIT // 2:
        assert overhead("zero-bubble", shape, transfer, lanes=True) == law


@pytest.mark.parametrize(("groups", "rounds"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("transfer", [0, 1, 2, 4])
def test_a_single_run_may_have_too_little_to_do_before_its_first_backward(
    groups: int, rounds: int, transfer: int
) -> None:
    """A0 has 2P v forwards to do until micro-batch 0 has been round v times and back over P - 1 workers.

    Any order loses what that takes longer than they do, beyond the law: c - v P (F - c).
    """
    shape, workers = equal_stages(groups, rounds, 1, split=True), 2 * groups
    loss = max(0, transfer - rounds * workers * (UNIT - transfer))
    assert overhead("zero-bubble", shape, transfer) == (workers - 1) * (UNIT + transfer) + loss


@pytest.mark.parametrize("order", ["af-pipe", "zero-bubble"])
@pytest.mark.parametrize(("groups", "rounds"), [(2, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize(("transfer", "hop"), [(1, 1), (2, 1), (2, 2)])
def test_base_hops_cost_little_beside_transfers(order: str, groups: int, rounds: int, transfer: int, hop: int) -> None:
    """On the NICs of A workers a transfer may wait for a base hop h: (P-1) h at most, if c + h <= F."""
    shape = equal_stages(groups, rounds, 2, split=order == "zero-bubble")
    lost = [overhead(order, shape, transfer, lanes=True, hop=h) for h in (0, hop)]
    assert lost[0] < lost[1] <= lost[0] + (2 * groups - 1) * hop


@pytest.mark.parametrize("pending", [4, 8, 15])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_law_needs_as_many_weight_gradients_as_the_drain_takes(groups: int, pending: int) -> None:
    """After its last backward the last worker has them and nothing else, while that passes P - 1 workers (c = F)."""
    drain = 2 * (2 * groups - 1) + 1
    shape = equal_stages(groups, 2, 2, split=True)
    lost = overhead("zero-bubble", shape, UNIT, pending=pending) - (2 * groups - 1) * 2 * UNIT
    if pending >= drain:
        assert lost == 0
    else:
        assert lost >= (drain - pending) * UNIT


def test_short_runs_expose_transfers() -> None:
    """G = P: 2c (R v / P - 1) beyond (P-1)(F+B) instead of 2c (P-1): once per round, not once per step."""
    shape, transfer = Shape(layers=6, groups=2, micro_batches=16), 2
    schedule = build("af-pipe", shape, Knobs(group=4))
    seconds = simulate(schedule, load(shape, WHOLE, latency=transfer)).seconds
    assert seconds - 3 * UNIT * 48 == 3 * 3 * UNIT + 2 * transfer * (48 // 4 - 1)
