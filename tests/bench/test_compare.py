"""Strategies side by side on real ranks: the same losses, honest parts of a step, and what is shown of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from lightning_afd.bench.balance import aligned, next_width
from lightning_afd.bench.compare import Comparison, Effort
from lightning_afd.bench.docs import write_docs
from lightning_afd.bench.job import Arena, Job, Step
from lightning_afd.bench.picture import draw
from lightning_afd.bench.rank import run
from lightning_afd.bench.registry import Contender, Peer, available, resolve
from lightning_afd.bench.report import show
from lightning_afd.bench.result import SAME_LOSS, Result, Section
from lightning_afd.bench.settings import Settings
from lightning_afd.bench.sweep_lines import by_change
from lightning_afd.bench.workload import Workload, busiest_expert, loss_of
from lightning_afd.errors import PlanError

TINY: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "experts": 4,
    "top_k": 2,
    "width": 8,
    "vocabulary": 32,
    "seq_len": 8,
    "sequences": 6,
    "lr": 0.5,
}
ALL = ["afd/af-pipe:2", "ep", "ep+nodedup", "flowmoe:3"]


def settings(folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "attention": 1,
        "ffn": 1,
        "micro_batches": 2,
        "contenders": ALL,
        "rates": [],
        "repetitions": 2,
        "workload": TINY,
        "output_dir": str(folder),
        "device": "cpu",
    }
    return Settings.read({**values, **changes})


def test_a_whole_run(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = settings(tmp_path)
    result, nothing = pool.run(run, 2, asked)
    assert nothing is None
    (section,) = result.sections
    assert section.disagreement < SAME_LOSS
    by_name = {one.name: one for one in section.measured}
    assert all(len(set(one.losses)) == 4 for one in section.measured), "two rounds of warm-up, and two repetitions"
    assert by_name["ep+nodedup"].step_bytes > by_name["ep"].step_bytes > by_name["afd/af-pipe:2"].step_bytes > 0
    assert set(section.compute) == {"A R=2", "F R=2", "AF R=1", "AF R=3"}
    for one in section.measured:
        assert len(one.seconds) == len(one.bounds) == 2
        assert all(sum(usage[part] for part in PARTS) == pytest.approx(1) for usage in one.usage.values())
        assert min(one.overhead.values()) > 0
        assert {"Af", "Ab", "Tf", "Tb", "Ef", "Eb", "Ew", "Df", "wait_for_net"} <= set(one.stages)
    show(result, asked)
    shown = capsys.readouterr().out
    assert "losses of 4 contenders agree" in shown
    assert Result.load(tmp_path / "bench.json") == result
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    document = tmp_path / "benchmarks.md"
    document.write_text("before\n<!-- numbers: strategies -->\nold\n<!-- end of numbers -->\nbehind\n")
    write_docs(result, document, "strategies")
    assert "old" not in document.read_text() and "| ep | 2 collocated, sequential, R=1 |" in document.read_text()
    assert (tmp_path / "benchmarks_strategies.png").exists()
    with pytest.raises(PlanError, match="has no lines `<!-- numbers: faults -->`"):
        write_docs(result, document, "faults")


PARTS = ("compute", "send", "reduce", "wait_for_A", "wait_for_net", "wait_for_F", "bubble")


def plain(job: Job, ahead: int) -> Step:
    """Plain data parallelism, as another system would join; it takes the data of so many steps ahead."""
    model = job.workload.model(job.device)
    optimizer = job.workload.make_optimizer(list(model.parameters()))
    numbers = count(ahead)

    def step() -> float:
        ids_bS = job.rows(next(numbers), job.rank, job.world)
        loss = loss_of(model, ids_bS) * len(ids_bS) / job.workload.sequences
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss.item()

    return step


def compare_with_plain() -> tuple[Section, float]:
    """A section with right and wrong other systems, and by how much computing alone has moved weights."""
    torch.set_num_threads(1)
    job = Job.open(Arena(workload=Workload(**TINY), attention=2, ffn=1, micro_batches=2, device="cpu"))
    others = [Contender(name=f"plain {ahead}", make=partial(plain, ahead=ahead)) for ahead in (0, 1)]
    comparison = Comparison(job, [resolve("afd"), resolve("ep"), *others])
    section = comparison.section("tiny", Effort(repetitions=1))
    twin = comparison._alone[0]
    before = [parameter.detach().clone() for parameter in twin.model.parameters()]
    twin.compute_alone()
    after = twin.model.parameters()
    moved = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True) if a.device.type != "meta")
    job.close()
    return section, moved


def test_losses_are_those_of_plain_data_parallelism(pool: RankPool) -> None:
    section, moved = pool.run(compare_with_plain, 3)[0]
    assert moved == 0.0, "computation alone must leave the weights as they are"
    assert section.disagreement > 10 * SAME_LOSS, "the last one has other data"
    section.measured.pop()
    assert section.disagreement < SAME_LOSS
    assert [one.plan.split(",")[0] for one in section.measured] == ["2A + 1F", "3 collocated", ""]
    assert section.measured[2].over_bound is None and len(section.measured[2].seconds) == 1


def raising(job: Job, *, rank: int, at_once: bool) -> Step:
    """Another system that fails on one rank, while it is built or in its first step."""

    def step() -> float:
        if job.rank == rank:
            raise RuntimeError("no such kernel\nand more")
        return 0.0

    if at_once:
        step()
    return step


def compare_with_broken(first: str) -> tuple[Section | str, int]:
    """A section in which some others fail; or what is said where the first one does."""
    torch.set_num_threads(1)
    job = Job.open(Arena(workload=Workload(**TINY), micro_batches=2, device="cpu"))
    makes = {"early": partial(raising, rank=1, at_once=True), "late": partial(raising, rank=0, at_once=False)}
    others = {name: Contender(name=name, make=make) for name, make in makes.items()} | {"ep": resolve("ep")}
    chosen = [others.pop(first), *others.values()]
    try:
        return Comparison(job, chosen).section("tiny", Effort(repetitions=1)), job.rank
    except PlanError as error:
        return str(error), job.rank
    finally:
        job.close()


def test_contenders_that_fail_are_left_out_with_a_line(pool: RankPool) -> None:
    for section, _ in pool.run(compare_with_broken, 2, "ep"):
        assert isinstance(section, Section)
        assert [one.name for one in section.measured] == ["ep"]
        assert section.notes == [
            "early: left out, as rank 1 raised RuntimeError: no such kernel",
            "late: left out, as rank 0 raised RuntimeError: no such kernel",
        ]
    refused = "early: left out, as rank 1 raised RuntimeError: no such kernel"
    assert pool.run(compare_with_broken, 2, "early") == [(refused, 0), (refused, 1)]


def compare_disturbed(readings: list[float]) -> tuple[Section, list[float]]:
    """A section of two repetitions; CPU seconds of the machine are read before and behind each."""
    torch.set_num_threads(1)
    job = Job.open(Arena(workload=Workload(**TINY), micro_batches=2, device="cpu"))
    comparison = Comparison(job, [resolve(name) for name in ("afd/af-pipe", "ep")])
    left = iter(readings)
    comparison._cpu = lambda: next(left)  # type: ignore[method-assign]
    section = comparison.section("tiny", Effort(repetitions=2, most_foreign_cpu=0.5))
    job.close()
    return section, list(left)


def test_nothing_is_left_of_a_repetition_that_was_disturbed(pool: RankPool) -> None:
    quiet, left = pool.run(compare_disturbed, 2, [0.0, 0.1] * 2)[0]
    disturbed, rest = pool.run(compare_disturbed, 2, [0.0, 9.0] + [0.0, 0.1] * 2)[0]
    assert left == rest == [] and disturbed.foreign_cpu == quiet.foreign_cpu == [0.1, 0.1]
    assert len(disturbed.link_rates) == 2 and all(len(seconds) == 2 for seconds in disturbed.compute.values())
    assert counts(disturbed.operators) == counts(quiet.operators)
    for one, same in zip(disturbed.measured, quiet.measured, strict=True):
        assert len(one.seconds) == len(one.bounds) == 2
        assert counts({"": one.stages}) == counts({"": same.stages})
        assert len(one.losses) == len(same.losses) + 1, "the step was made all the same"


def counts(stages: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[tuple[str, str], float]:
    """How many actions of each kind count; how often a cause is waited for depends on the run."""
    return {
        (role, kind): figures["count"]
        for role, kinds in stages.items()
        for kind, figures in kinds.items()
        if not kind.startswith("wait")
    }


def test_routing_can_be_made_uneven() -> None:
    cpu = torch.device("cpu")
    even = Workload(**{**TINY, "experts": 8, "sequences": 32})
    some, much = (busiest_expert(replace(even, skew=skew), cpu) for skew in (1.0, 3.0))
    assert busiest_expert(even, cpu) < some < much <= 8 / 2, "all tokens choose it"
    assert much > 1.7


def test_a_sweep_is_drawn_as_lines(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = [{"micro_batches": [1, 2, 3]}, {"workload.skew": [0.0, 2.0]}]
    asked = settings(tmp_path, contenders=["afd/af-pipe", "ep"], repetitions=1, sweep=sweep, picture="lines")
    result, _ = pool.run(run, 2, asked)
    assert {names: len(own) for names, own in by_change(result.sections).items()} == {
        ("micro_batches",): 3,
        ("workload.skew",): 2,
    }
    result.sections[1].measured.pop()  # as one that was left out
    show(result, asked)
    shown = capsys.readouterr().out
    assert "losses agree (largest relative difference" in shown
    assert "workload.skew=2: the busiest expert of a layer gets " in shown
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    draw(replace(result, picture="map"), tmp_path / "map.png")


def test_contenders_that_are_not_installed_are_skipped_with_a_line() -> None:
    peers = {
        "other": Peer(module="nowhere", needs=("no_such_package", "json")),
        "here": Peer(module="json", needs=("json",), same_weights=True),
    }
    found, skipped = available(["afd", "other", "ep", "here", "ep"], peers)
    assert [contender.name for contender in found] == ["afd", "ep", "here"]
    assert skipped == ["other: skipped, as no_such_package is not installed"]
    with pytest.raises(PlanError, match="no contender can run here: other: skipped"):
        available(["other"], peers)
    with pytest.raises(PlanError, match="contender othr is not known; choices: afd, ep, experts-only, flowmoe, other"):
        resolve("othr", peers)


def test_widths_are_searched_on_a_line() -> None:
    def ratio(width: int) -> float:
        return 0.2 + width / 200

    tried = {100: ratio(100)}
    for _ in range(3):
        width = next_width(tried)
        tried[width] = ratio(width)
    assert abs(min(tried.values(), key=lambda value: abs(value - 1)) - 1) < 0.01
    assert [aligned(width) for width in (1, 139, 140, 202)] == [8, 136, 144, 200]
    assert next_width({100: 0.5, 110: 0.4}) == 200, "where noise turns the line around, it is taken through the origin"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("bench=local_net",),
            "network namespaces need root: run this command as root, for example with sudo; rates=[] ",
        ),
        (("bench=everything",), "bench=everything is not a choice; bench can be bundle, "),
        (("contenders=[afd/upwards]",), "contender afd/upwards: order upwards is not a choice"),
        (("contenders=[nobody]",), "contender nobody is not known; choices: afd, ep, experts-only, flowmoe, ddp, "),
        (("docs=nowhere.md",), "docs=nowhere.md can't be read: No such file"),
        (("workload.depth=3",), "workload.depth is not a setting; workload has "),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(given: tuple[str, ...], message: str, tmp_path: Path) -> None:
    program = (
        "import os, sys, lightning_afd.recipes.cli as cli; os.geteuid = lambda: 1000;"
        "sys.argv.insert(1, 'bench'); cli.main()"
    )
    command = [sys.executable, "-c", program, *given, "hydra.run.dir=."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"lightning-afd: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
