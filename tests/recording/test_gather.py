"""What ranks measure by their own clocks becomes one timeline, whose clocks agree as far as messages can tell."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from local_job import LocalJob, make_batches
from recorded import recorded, simulated
from tiny import tiny

from lightning_afd.peers import Peers
from lightning_afd.placement import Layout, Worker
from lightning_afd.recording import NicTraffic, RankClock, Traffic, chrome_trace, load, save
from lightning_afd.recording.gather import Part, common_clock, join
from lightning_afd.report.predict import predict
from lightning_afd.schedule.actions import Step
from lightning_afd.schedule.programs import programs_of
from lightning_afd.schedule.shape import Shape
from lightning_afd.timeline import Timeline
from lightning_afd.waits import Wait, usage_of, waits_of

SHAPE = Shape(layers=4, groups=2, micro_batches=6, router_logits=True)
STEP = simulated(SHAPE)
PROGRAMS = programs_of(STEP.layout, "af-pipe", SHAPE)


def parts_of(timeline: Timeline, ahead: list[float], hosts: list[str]) -> list[Part]:
    """What the ranks of a step would bring, if their clocks were so many seconds ahead."""
    return [
        Part(
            times=array("d", (t + ahead[rank] for span in spans for t in (span.start, span.end))),
            reduces=tuple((r.start + ahead[rank], r.end + ahead[rank], int(r.nbytes)) for r in timeline.reduces[:1])
            if rank == 0
            else (),
            sent={("Df", 3): (2, 100 + rank)},
            tokens_per_expert=((rank, 1), (2, 3)) if rank < 2 else (),
            kernels=frozenset({"loop"} if rank == 2 else {"grouped_mm"} if rank == 3 else ()),
            host=hosts[rank],
            source="perf_counter",
            nics={"eth0": (10, rank)} if rank % 2 == 0 else {},
        )
        for rank, spans in timeline.by_rank.items()
    ]


def travel_back(timeline: Timeline) -> list[Wait]:
    """Receives that end before a sender has begun."""
    sends = {(span.rank, span.action): span.start for span in timeline.spans if timeline.lane(span) == "send"}
    waits = waits_of(timeline, SHAPE)
    senders = {w.span: Peers(timeline.layout, SHAPE, w.span.rank).senders(w.span.action) for w in waits}
    return [w for w in waits if any(w.span.end < sends[s, w.span.action] - 1e-8 for s in senders[w.span])]


@pytest.mark.parametrize("ahead", [0.0, 1234567.25])
def test_ranks_of_one_host_share_a_clock(ahead: float) -> None:
    joined = join(parts_of(STEP, [ahead] * 4, ["here"] * 4), STEP.layout, PROGRAMS)
    assert joined.timeline == STEP
    assert joined.clocks == (RankClock(),) * 4
    assert joined.traffic[1] == Traffic(1, 3, "Df", 2, 101)
    assert joined.tokens_per_expert == ((1, 2), (4, 6))
    assert joined.kernels == "grouped_mm, loop"
    assert joined.nics == (NicTraffic(0, "eth0", 10, 0), NicTraffic(2, "eth0", 10, 2))


def test_a_rank_that_did_something_else_is_noticed() -> None:
    parts = parts_of(STEP, [0.0] * 4, ["here"] * 4)
    with pytest.raises(ValueError, match="zip"):
        join([*parts[:3], replace(parts[3], times=parts[3].times[:-2])], STEP.layout, PROGRAMS)


@pytest.mark.parametrize("hosts", [["a", "a", "b", "b"], ["a", "b", "a", "c"], ["a", "b", "c", "d"]])
def test_clocks_of_hosts_are_compared_by_messages(hosts: list[str]) -> None:
    generator = random.Random(str(hosts))
    shifts = {host: generator.uniform(-1e6, 1e6) for host in hosts}
    ahead = [shifts[host] for host in hosts]
    joined = join(parts_of(STEP, ahead, hosts), STEP.layout, PROGRAMS)
    for rank, clock in enumerate(joined.clocks):
        assert abs(clock.offset - (ahead[0] - ahead[rank])) <= clock.accuracy + 1e-9
        assert clock.accuracy < 3e-3  # a message of the step is under way for 1 ms and more; its hops add up
        assert (clock.accuracy == 0) == (hosts[rank] == "a")
        assert clock.host == sorted(set(hosts)).index(hosts[rank])
    assert not travel_back(joined.timeline)
    lengths = [sum(s.seconds for s in own) for own in joined.timeline.by_rank.values()]
    assert lengths == pytest.approx([sum(s.seconds for s in own) for own in STEP.by_rank.values()])


def test_without_the_comparison_messages_would_travel_back_in_time() -> None:
    ahead = [0.0, 0.0, 5.0, 5.0]
    joined = join(parts_of(STEP, ahead, ["here"] * 4), STEP.layout, PROGRAMS)
    assert travel_back(joined.timeline)


def test_bounds_lead_over_other_hosts() -> None:
    """Replica 0 and replica 1 exchange nothing, but both talk to the F rank."""
    layout, shape = Layout(attention=2, ffn=1), Shape(layers=1, micro_batches=1)
    one = simulated(shape)
    spans = tuple(replace(s, rank=r) for r, own in ((0, 0), (1, 0), (2, 1)) for s in one.by_rank[own])
    raw = Timeline(layout, tuple(replace(s, start=s.start + 7 * s.rank, end=s.end + 7 * s.rank) for s in spans))
    clocks = common_clock(raw, shape, ["a", "b", "c"])
    assert [clock.offset for clock in clocks] == pytest.approx([0, -7, -14], abs=3e-3)
    assert 0 < clocks[2].accuracy < clocks[1].accuracy


def test_times_are_whole_nanoseconds_from_the_first_action_on() -> None:
    parts = parts_of(STEP, [1 / 3] * 4, ["here"] * 4)
    timeline = join(parts, STEP.layout, PROGRAMS).timeline
    assert timeline.start == 0
    times = [t for span in timeline.by_rank[0] for t in (span.start, span.end)]
    assert all(t == round(t * 1e9) / 1e9 for t in times)
    assert all(a <= b for a, b in pairwise(times))


def joined_step(job: LocalJob) -> Timeline:
    """The step that a job has just made."""
    part = {"reduces": (), "tokens_per_expert": (), "kernels": frozenset[str](), "host": "here", "source": "here"}
    parts = [Part(times=engine.runtime.times, sent=dict(engine.link.sent), **part) for engine in job.engines]  # type: ignore[arg-type]
    return join(parts, job.engines[0].plan.layout, job.engines[0].executed).timeline


def test_actions_that_overtake_a_dispatch_keep_their_times() -> None:
    """Where the host would wait for counts, a computation is launched before the dispatch that stands before it."""
    job = LocalJob(tiny(layers=2), Layout(attention=1, ffn=1), "layer-major")
    runtime = job.engines[0].runtime
    runtime.would_wait = lambda action: (action.op, action.phase) == ("D", "f")
    job.step(make_batches(1, 3))
    executed = [span.action for span in runtime.spans]
    assert executed != [step.action for step in job.engines[0].executed.by_worker[Worker("A", 0)]]
    spans = joined_step(job).by_rank[0]
    assert [span.action for span in spans] == executed
    for mine, theirs in zip(spans, runtime.spans, strict=True):
        assert mine.end - mine.start == pytest.approx(theirs.end - theirs.start, abs=3e-9)


def test_ranks_with_both_roles_measure_one_program(tmp_path: Path) -> None:
    layout = Layout.together(2)
    job = LocalJob(tiny(layers=2), layout, "flowmoe")
    job.step(make_batches(2, 3))
    programs, shape = job.engines[0].executed, job.engines[0].plan.shape(3)
    timeline = joined_step(job)
    for spans in timeline.by_rank.values():
        assert [Step(timeline.worker(span), span.action) for span in spans] == list(programs.by_worker[Worker("A", 0)])
    waits = waits_of(timeline, shape)
    assert {(w.span.worker, w.sender) for w in waits} == {(Worker("F", 0), "A"), (Worker("A", 0), "F")}
    assert [w.span for w in waits] == [span for span in timeline.spans if timeline.waits(span)]
    assert len(waits) == 2 * 2 * 4 * 3  # ranks, layers, D and C forward and backward, micro-batches
    for usage in usage_of(timeline, waits).values():
        assert usage.step == pytest.approx(timeline.seconds) and min(usage.seconds().values()) > -1e-9
    recording = recorded(timeline, shape, order="flowmoe")
    assert load(save(recording, tmp_path)) == recording
    assert recording.schedule() == programs.schedule
    predicted = predict(recording, waits).timeline
    assert len(predicted.spans) == len(timeline.spans) / 2
    arrows = [event for event in chrome_trace(recording)["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 2 * len(waits)  # from each of two senders
