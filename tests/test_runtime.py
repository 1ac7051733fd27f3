"""The runtime executes exactly the program, says where it failed, and goes on while messages are under way."""

from __future__ import annotations

import pytest
from local_job import LocalJob, make_batches, plain_step
from tiny import tiny

from lightning_afd.errors import ProtocolError
from lightning_afd.placement import Layout, Worker
from lightning_afd.runtime import Runtime
from lightning_afd.schedule.actions import Action, Step
from lightning_afd.schedule.orders import ORDERS, build
from lightning_afd.transport.base import Channel, tag_of
from lightning_afd.transport.local import LocalNetwork

LAYOUT = Layout(attention=1, ffn=1)


A0, F0 = Worker("A", 0), Worker("F", 0)


def steps(names: str) -> tuple[Step, ...]:
    return tuple(map(Step.parse, names.split()))


def test_handlers_run_in_the_order_of_the_program_and_leave_spans() -> None:
    ran: list[str] = []
    handlers = {(op, "f"): lambda action: ran.append(str(action)) for op in "AD"}
    runtime = Runtime(3, {A0: handlers})
    runtime.run(steps("A0:A0f0 A0:D0f0 A0:A0f1"))
    assert ran == ["A0f0", "D0f0", "A0f1"] == [str(span.action) for span in runtime.spans]
    assert {span.rank for span in runtime.spans} == {3}
    times = [time for span in runtime.spans for time in (span.start, span.end)]
    assert times == sorted(times)
    runtime.run(steps("A0:A0f1"))
    assert [str(span.action) for span in runtime.spans] == ["A0f1"]


def test_a_rank_with_two_roles_does_each_end_of_a_transfer_by_its_own_table() -> None:
    ran: list[str] = []
    ends = {A0: {("D", "f"): lambda _: ran.append("sent")}, F0: {("D", "f"): lambda _: ran.append("received")}}
    runtime = Runtime(0, ends)
    runtime.run(steps("A0:D0f0 F0:D0f0"))
    assert ran == ["sent", "received"] and [span.worker for span in runtime.spans] == [A0, F0]


def test_exception_keeps_its_type_and_says_where_it_was() -> None:
    def fail(action: Action) -> None:
        raise KeyError("labels")

    runtime = Runtime(5, {F0: {("E", "b"): fail, ("D", "b"): lambda action: None}})
    with pytest.raises(KeyError, match="labels") as failure:
        runtime.run(steps("F0:D7b2 F0:E7b2 F0:D7b3"))
    assert failure.value.__notes__ == ["rank 5 (F0) failed in E7b2: layer 7, micro-batch 2"]
    assert [str(span.action) for span in runtime.spans] == ["D7b2"]


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_executes_the_schedule(order: str) -> None:
    job = LocalJob(tiny(layers=2), Layout(attention=2, ffn=2), order)
    job.step(make_batches(2, 3))
    for engine in job.engines:
        program = build(order, engine.plan.shape(3)).programs[engine.worker]
        assert tuple(span.action for span in engine.runtime.spans) == program
        assert tuple(step.action for step in engine.program(3, training=True)) == program


class Withheld:
    """Keeps the combine of layer 0, micro-batch 0 back until the A rank has sent the dispatch of micro-batch 1."""

    def __init__(self, order: str) -> None:
        self.times = 0
        self.job = LocalJob(tiny(layers=2).double(), LAYOUT, order, network=LocalNetwork(LAYOUT, hold=self.hold))

    def hold(self, channel: Channel, tag: int) -> bool:
        held = (channel, tag) == ("Cf", tag_of(0, 0)) and "D0f1" not in self.done()
        self.times += held
        return held

    def done(self) -> list[str]:
        return [str(span.action) for span in self.job.engines[0].runtime.spans]


@pytest.mark.parametrize("order", ["af-pipe", "layer-major"])
def test_attention_goes_on_while_the_experts_have_not_answered(order: str) -> None:
    withheld, batches = Withheld(order), make_batches(1, 2)
    outcome = withheld.job.step(batches)
    assert outcome.difference(*plain_step(tiny(layers=2).double(), batches)) < 1e-12
    assert withheld.done() == [str(step.action) for step in withheld.job.engines[0].program(2, training=True)]
    assert withheld.done()[:5] == ["A0f0", "D0f0", "A0f1", "D0f1", "C0f0"]


def test_sequential_order_has_nothing_to_do_meanwhile() -> None:
    withheld = Withheld("sequential")
    with pytest.raises(ProtocolError) as failure:
        withheld.job.step(make_batches(1, 2))
    assert str(failure.value) == "deadlock: rank 0 waits for C0f0 from rank 1; rank 1 waits for D1f0 from rank 0"
    assert withheld.times > 0
    assert withheld.done() == ["A0f0", "D0f0"]


@pytest.mark.parametrize(
    ("program", "launched"),
    [
        ("A0f0 D0f0 A0f1 D0f1 C0f0", "A0f0 A0f1 D0f0 D0f1 C0f0"),
        ("A0f0 D0f0 H0f0 L0f0 A0f1 D0f1", "A0f0 A0f1 D0f0 H0f0 L0f0 D0f1"),
        ("A0f0 D0f0 C0f0 A1f0 D1f0", "A0f0 D0f0 C0f0 A1f0 D1f0"),  # a transfer in between, then the same micro-batch
        ("A0f0 D0f0 E0f1 S0b0 D1f1 S0b1 A1f2", "A0f0 E0f1 D0f0 S0b0 D1f1 S0b1 A1f2"),
        ("A0f0 D0f0 D0b1 A0f1", "A0f0 D0f0 D0b1 A0f1"),
    ],
)
def test_a_dispatch_that_would_wait_lets_one_computation_go_first(program: str, launched: str) -> None:
    runtime = Runtime(0, {})
    runtime.would_wait = lambda action: (action.op, action.phase) == ("D", "f")
    order = [Step(A0, Action.parse(name)) for name in program.split()]
    assert " ".join(str(step.action) for step in runtime._in_order(order)) == launched
    runtime.would_wait = lambda action: False
    assert list(runtime._in_order(order)) == order
