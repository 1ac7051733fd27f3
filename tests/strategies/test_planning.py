"""Layouts that are decided at the start of a fit: chosen as planned, followed by all ranks, and the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import join
from fits import worst
from planning_cases import (
    QUICK,
    alone,
    apart,
    evaluate,
    fit,
    fit_and_save,
    fit_then_validate,
    fit_twice,
    fit_with_failing_rank_0,
    together,
    without_a_model,
)
from pool import RankPool, RemoteError

from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import Layout
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.planning.options import Planning


@pytest.fixture(scope="module")
def plan_of_four(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a fit on 4 ranks."""
    folder = tmp_path_factory.mktemp("planned")
    pool.run(fit, 4, 4, apart, QUICK, folder)
    return folder / "plan.json"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_arrange_themselves_by_the_plan(pool: RankPool, tmp_path: Path, world: int) -> None:
    ranks = pool.run(fit, world, world, apart, QUICK, tmp_path)
    first, expected = ranks[0], {2: "1A + 1F", 4: "3A + 1F"}[world]
    assert {rank.layout for rank in ranks} == {expected}
    assert all(rank.arrangement == first.arrangement and rank.measured == 1 for rank in ranks)
    assert f"{expected}, order af-pipe, 1 micro-batches, recompute=none" in first.said[0]
    assert "Disaggregate: no collocated layout fits into memory" in first.said[1]
    plain = alone(first.arrangement.layout.attention)
    assert first.losses == pytest.approx(plain.losses, rel=1e-10)
    assert worst(join([rank.gradients for rank in ranks]), plain.gradients)[0] <= 1e-9
    assert worst(join([rank.weights for rank in ranks]), plain.weights)[0] <= 1e-9
    saved = PlanChoice.loads(first.plan, "plan.json")
    assert saved.candidates[0].layout.describe() == expected and "4 experts" in saved.model


def test_only_what_is_open_is_chosen(pool: RankPool, tmp_path: Path) -> None:
    given = {"attention": 2, "micro_batches": 2, "order": "layer-major", "recompute": "full", "dedup": "node"}
    done = pool.run(fit, 4, 4, apart, {**QUICK, **given}, tmp_path)[0].arrangement
    assert (done.layout, done.micro_batches) == (Layout(attention=2, ffn=2, node_ranks=4), 2)
    assert (done.order, done.recompute, done.recompute_experts) == ("layer-major", "full", False)


def test_nothing_is_measured_where_nothing_is_open(pool: RankPool, tmp_path: Path) -> None:
    given = {"attention": 1, "ffn": 1, "micro_batches": 2}
    ranks = pool.run(fit, 2, 2, apart, given, tmp_path)
    assert [(rank.measured, rank.said, rank.plan) for rank in ranks] == [(0, [], "")] * 2


def test_where_separate_ranks_lose_all_get_both_roles(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(fit, 2, 2, together, QUICK, tmp_path)
    assert {rank.layout for rank in ranks} == {"2 collocated"} and len(ranks[0].said) == 1
    assert "trains collocated (order flowmoe): a plan after" in ranks[0].said[0]
    assert "Do not disaggregate: collocated (flowmoe, micro_batches=1) takes 0.481 s per step" in ranks[0].said[0]
    plain = alone(2)
    assert ranks[0].losses == pytest.approx(plain.losses, rel=1e-10)
    assert worst(join([rank.weights for rank in ranks]), plain.weights)[0] <= 1e-9


def test_a_job_may_end_instead(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.try_run(fit, 2, 2, together, {**QUICK, "fallback": "error"}, tmp_path)
    for answer in answers:
        assert answer.type_name == "MisconfigurationException"
        assert "fallback='error'" in answer.message and "disaggregation 0.866 s" in answer.message
    given = pool.run(fit, 2, 2, together, {**QUICK, "attention": 1}, tmp_path)[0]
    assert given.layout == "1A + 1F" and "Do not disaggregate" in given.said[1], "who chooses is told"


def test_a_plan_is_reused(pool: RankPool, plan_of_four: Path, tmp_path: Path) -> None:
    ranks = pool.run(fit, 4, 4, together, {**QUICK, "plan": str(plan_of_four)}, tmp_path)
    assert {(rank.layout, rank.measured, rank.plan) for rank in ranks} == {("3A + 1F", 0, "")}
    assert ranks[0].said[0].startswith(f"strategy afd: plan={plan_of_four}: 3A + 1F")
    assert not any("was made for" in line for line in ranks[0].said)


def test_what_a_plan_was_not_made_for_is_said(pool: RankPool, plan_of_four: Path, tmp_path: Path) -> None:
    other = {**QUICK, "plan": str(plan_of_four), "dedup": "node", "optimizer_sharding": "torch"}
    (line,) = (line for line in pool.run(fit, 4, 4, apart, other, tmp_path)[0].said if "was made for" in line)
    assert "was made for dedup=rank, optimizer_sharding=none, but this job has dedup=node, optimizer" in line


DAMAGED: dict[str, tuple[Callable[[str], str], dict[str, Any], str]] = {
    "world": (lambda text: text, {}, "is for 4 ranks (3A + 1F), but the Trainer has 2"),
    "model": (lambda text: text.replace("4 experts", "8 experts"), {"world": 4}, "but this one has 3 layers"),
    "given": (
        lambda text: text,
        {"world": 4, "attention": 2},
        "has attention=3, but the strategy was given attention=2",
    ),
    "no JSON": (lambda text: text[:-9], {}, "is no plan: "),
    "fields": (lambda text: text.replace('"ffn"', '"fnf"'), {}, "is damaged: "),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_plan_that_does_not_fit_is_refused(pool: RankPool, plan_of_four: Path, tmp_path: Path, case: str) -> None:
    change, options, sentence = DAMAGED[case]
    (tmp_path / "other.json").write_text(change(plan_of_four.read_text()))
    world = options.pop("world", 2)
    answers = pool.try_run(fit, world, world, apart, {"plan": str(tmp_path / "other.json"), **options}, tmp_path)
    assert len(answers) == world
    for answer in answers:
        assert isinstance(answer, RemoteError) and answer.type_name == "MisconfigurationException"
        assert sentence in answer.message


def test_a_missing_plan_is_refused(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.try_run(fit, 2, 2, apart, {"plan": str(tmp_path / "none.json")}, tmp_path)
    assert all("can't be read: No such file" in answer.message for answer in answers)


def test_a_resumed_job_takes_the_plan_of_its_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    pool.run(fit_and_save, 2, 2, apart, tmp_path, saved)
    again = pool.run(fit, 2, 2, together, QUICK, tmp_path / "again", saved)
    assert {(rank.layout, rank.measured, rank.plan) for rank in again} == {("1A + 1F", 0, "")}
    assert again[0].said[0].startswith("strategy afd: the checkpoint's plan: 1A + 1F")
    other = pool.run(fit, 4, 4, apart, QUICK, tmp_path / "other", saved)
    assert {(rank.layout, rank.measured) for rank in other} == {("3A + 1F", 1)}
    assert {evaluated for evaluated in pool.run(evaluate, 4, tmp_path, None)} == {("2A + 2F", 0)}
    assert {evaluated for evaluated in pool.run(evaluate, 2, tmp_path, saved)} == {("1A + 1F", 0)}


def test_a_split_module_stays_as_it_is(pool: RankPool, tmp_path: Path) -> None:
    """A second Trainer measures nothing, as the module has been divided for a layout."""
    assert pool.run(fit_twice, 4, 4, tmp_path) == [(["3A + 1F", "3A + 1F"], [1, 0])] * 4


def test_a_split_module_spreads_copies_only_where_that_is_asked_for(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(fit_then_validate, 4, 4, tmp_path) == [[("node", True), (True, False)]] * 4


def test_what_cannot_be_planned_goes_by_rule(pool: RankPool, tmp_path: Path) -> None:
    stream = pool.run(fit, 2, 2, apart, {}, tmp_path, None, {"streams": True})[0]
    assert stream.layout == "1A + 1F" and stream.arrangement.micro_batches == 4
    assert "by rule: a _Stream does not say its batch_size" in stream.said[0]
    assert len(stream.losses) == 2, "nothing was taken out of the stream"
    told = {**QUICK, "planning": Planning(rows=4, tokens=6, trials=0)}
    assert pool.run(fit, 2, 2, apart, told, tmp_path, None, {"streams": True})[0].measured == 1
    assert pool.run(without_a_model, 3, tmp_path) == [("2A + 1F", True)] * 3


def test_planning_leaves_random_numbers_and_batches_alone(pool: RankPool, tmp_path: Path) -> None:
    """With trials on real steps: losses under dropout, and the next random number, are those of the explicit layout."""
    module, options = {"dropout": 0.5, "steps": 3}, {"dedup": "node", "planning": Planning(trials=2, repetitions=1)}
    planned = pool.run(fit, 4, 4, apart, {**QUICK, **options}, tmp_path, None, module)
    first = planned[0]
    tried = [line for line in first.said if "tried on steps of a few layers" in line]
    assert len(tried) == 1 and "3A + 1F" in tried[0] and tried[0].count(" s,") == 1
    layout = first.arrangement.layout
    given = {"attention": layout.attention, "ffn": layout.ffn, "groups": layout.groups, "micro_batches": 1}
    explicit = pool.run(fit, 4, 4, None, given, tmp_path, None, module)
    for mine, its in zip(planned, explicit, strict=True):
        assert (mine.losses, mine.random) == (its.losses, its.random)
    assert len(set(first.losses)) > 1
    assert worst(join([rank.weights for rank in planned]), join([rank.weights for rank in explicit]))[0] == 0


def test_ranks_fail_together(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.try_run(fit_with_failing_rank_0, 3, tmp_path)
    for rank, answer in enumerate(answers):
        assert isinstance(answer, RemoteError)
        assert "the solver broke" in answer.message, (rank, answer.message)


def test_a_real_measurement(pool: RankPool, tmp_path: Path) -> None:
    options = {"planning": Planning(budget_seconds=2.0)}
    ranks = pool.run(fit, 2, 2, None, options, tmp_path)
    assert len({rank.layout for rank in ranks}) == 1 and "a plan after" in ranks[0].said[0]
    assert json.loads(ranks[0].plan)["model"].startswith("3 layers")


def test_options_of_planning_are_checked() -> None:
    with pytest.raises(MisconfigurationException, match=r"planning\.trials=-1: choose 0 or more"):
        Planning(trials=-1)
    with pytest.raises(MisconfigurationException, match="repetitions=0: some time and at least 1 repetition"):
        Planning(repetitions=0)


def test_layouts_that_are_open() -> None:
    def layouts(world: int, **options: Any) -> list[str]:
        return [layout.describe() for layout in AFDConfig(**options).sizes.layouts(world)]

    assert layouts(4) == ["1A + 3F", "2A + 2F", "3A + 1F", "2 x (1A + 1F)"]
    assert layouts(8, attention=2) == ["2A + 6F", "2 x (2A + 2F)"]
    assert layouts(4, groups=(2, 1)) == ["2 x 1A + 1 x 2F"]
    assert layouts(6, attention=1, ffn=2) == ["2 x (1A + 2F)"]
    assert [AFDConfig(plan="none").needs_plan(4), AFDConfig().needs_plan(1), AFDConfig().needs_plan(2)] == [0, 0, 1]
    assert AFDConfig(attention=1, ffn=1).arrange(4).layout == Layout(attention=1, ffn=1, groups=2)
    assert AFDConfig().arrange(3).layout == Layout(attention=2, ffn=1)
    assert AFDConfig(groups=(2, 1)).arrange(4).layout == Layout(attention=1, ffn=2, groups=(2, 1))
