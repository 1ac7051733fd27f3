"""The planner against exhaustive simulation, the paper's direction, its memory limits and its verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import plan_cases as shapes
import pytest

from lightning_afd.allocate.candidates import best_candidates, simulated, ways
from lightning_afd.allocate.choice import PlanChoice
from lightning_afd.allocate.choose import Effort, choose, division_of
from lightning_afd.allocate.collocated import Prediction, baselines
from lightning_afd.allocate.fit import Fitting, distinct
from lightning_afd.allocate.request import Candidate, Request
from lightning_afd.allocate.simulated import Ordering, pass_seconds, shorter, simulated_pass
from lightning_afd.allocate.verdict import judge
from lightning_afd.cost.job import BatchShape, Choices, Job
from lightning_afd.cost.memory import memory_of, scheduled_activations
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout, Worker
from lightning_afd.schedule.orders import Knobs, build

NODE_DEDUP = Choices(dedup="node")


def request(name: str = "deepseek_moe_paper", layers: int = 4, length: int = 4096, **other: object) -> Request:
    found = Request(
        model=shapes.model(name, layers),
        cluster=shapes.cluster(devices=6),
        batch=BatchShape.rows(1, length),
        parts=12,
        choices=NODE_DEDUP,
        groups=(1, 2),
    )
    return replace(found, **other)  # type: ignore[arg-type]


def every_layout(asked: Request) -> list[Layout]:
    """All layouts of the cluster, also those that the planner leaves out."""
    devices = asked.cluster.devices
    return [
        Layout(attention=a, ffn=f, groups=groups)
        for groups in asked.groups
        for a in range(1, devices // groups)
        for f in range(1, devices // groups - a + 1)
    ]


def exhaustive(asked: Request) -> float:
    """The least simulated step time of all layouts, orders and runs."""
    fitting = Fitting(asked)
    found: list[Candidate] = []
    for layout in every_layout(asked):
        for order in asked.orders:
            found += ways(asked, fitting, layout, order=order)
    return min(simulated(asked, candidate).seconds for candidate in found)


@pytest.mark.parametrize(
    "asked",
    [
        request(),
        request(length=16384),
        request("gpt_oss_paper", cluster=shapes.cluster(2, 3)),
        request("qwen3_paper", parts=16, cluster=shapes.cluster(2, 3, nic=10)),
    ],
    ids=["node", "long", "two nodes", "slow network"],
)
def test_regret_against_the_exhaustive_grid(asked: Request) -> None:
    chosen = choose(asked, Effort(predict={}))
    assert chosen.best.seconds <= exhaustive(asked) * 1.03
    assert chosen.best.bound_seconds <= chosen.best.seconds


@pytest.mark.parametrize("name", ["deepseek_moe_paper", "gpt_oss_paper", "qwen3_paper"])
def test_longer_sequences_get_more_attention_ranks(name: str) -> None:
    """The direction of DisagMoE's figure 12, without memory limits."""
    shares = []
    for length in (4096, 32768):
        asked = request(name, 8, length, cluster=shapes.cluster(3), parts=48, groups=(1,))
        layout = best_candidates(asked, 1)[0].layout
        shares.append(layout.attention / layout.ffn)
    assert shares[0] < shares[-1]


def test_extrapolated_passes_are_those_of_the_whole_simulation() -> None:
    job = request(layers=16, cluster=shapes.cluster()).job(Layout(attention=4, ffn=4), 12, ("none", False))
    for ordering in (Ordering(order="af-pipe", group=2), Ordering(order="zero-bubble", group=4)):
        whole = simulated_pass(job, ordering, reduces=False).seconds
        assert pass_seconds(job, ordering) == pytest.approx(whole, rel=0.05)
        assert simulated_pass(shorter(job, 4), ordering, reduces=False).seconds < whole / 2


@pytest.mark.parametrize("rung", [("none", False), ("full", True)])
@pytest.mark.parametrize("order", ["af-pipe", "zero-bubble"])
def test_memory_of_a_candidate_is_not_less_than_its_schedule_needs(order: str, rung: tuple[str, bool]) -> None:
    asked = request(layers=6, rungs=(rung,), cluster=shapes.cluster())
    for candidate in ways(asked, Fitting(asked), Layout(attention=2, ffn=2, groups=2), order=order):
        job: Job = asked.job(candidate.layout, candidate.micro_batches, candidate.rung)
        schedule = build(order, job.shape, Knobs(group=candidate.group))
        needed = max(
            memory_of(job, worker, scheduled_activations(job, worker, schedule.programs[worker])).total
            for worker in (Worker("A", 0), Worker("F", 0))
        )
        assert needed * 0.999 <= candidate.memory_bytes <= needed * 1.5


def test_less_memory_means_recomputation_then_shorter_passes_then_an_error() -> None:
    """The more is computed again, and the more often the pipeline is filled, the longer the step."""
    found = [
        best_candidates(request(layers=8, cluster=shapes.cluster(memory_gb=gb), groups=(1,)), 1)[0] for gb in (1e6, 16)
    ]
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    assert found[0].rung == ("none", False) and found[0].passes == 1
    assert found[1].memory_bytes <= 16e9 * 0.92 < found[0].memory_bytes
    with pytest.raises(PlanError, match=r"no layout on \d x H800-SXM-80GB fits into memory: the nearest one, .* needs"):
        best_candidates(request(cluster=shapes.cluster(memory_gb=2)), 1)


def test_linear_program_agrees_with_the_enumeration_where_bubbles_are_small() -> None:
    asked = request(parts=48, groups=(1,), layers=8)
    chosen = choose(asked, Effort(predict={}))
    assert chosen.division is not None
    assert abs(chosen.division.attention - chosen.best.layout.attention) <= 1
    assert chosen.division.seconds == pytest.approx(chosen.best.bound_seconds, rel=0.15)


def test_base_hops_count_on_the_network_of_attention_ranks() -> None:
    """With two groups the residual stream travels as well: attention's NICs carry more than those of experts."""
    wide = request(cluster=shapes.cluster(8, 2), layers=8)
    needs = []
    for groups in (1, 2):
        layout = Layout(attention=8 // groups, ffn=8 // groups, groups=groups)
        (candidate, *_) = ways(wide, Fitting(wide), layout)
        needs.append(division_of(wide, candidate).needs)
    assert needs[0].attention_nic == pytest.approx(needs[0].ffn_nic, rel=0.01)
    assert needs[1].attention_nic > 1.2 * needs[1].ffn_nic


def test_verdict_turns_in_the_dead_zone() -> None:
    """On a slow network the NICs alone take longer than all computation, and other layouts are faster."""
    verdicts = []
    for nic in (400, 0.5):
        asked = request(cluster=shapes.cluster(2, 4, nic=nic))
        candidate = next(ways(asked, Fitting(asked), Layout(attention=4, ffn=4)))
        other = Prediction(name="experts inside a node", seconds=1.0 if nic == 400 else 1e-3, detail="", memory_bytes=0)
        verdicts.append(judge(asked, candidate, [other]))
    fast, slow = verdicts
    assert fast.disaggregate and not fast.dead_zone and fast.regime != "communication-bound"
    assert fast.sentence.startswith("Disaggregate: ") and fast.sentence.endswith("transfers can be hidden.")
    assert slow.dead_zone and not slow.disaggregate and slow.regime == "communication-bound"
    assert slow.sentence.startswith("Do not disaggregate: experts inside a node takes 0.001 s per step")
    assert "this is the dead zone of disaggregation" in slow.sentence
    assert slow.intensities["A"].ridge == pytest.approx(800 * fast.intensities["A"].ridge)
    for verdict in verdicts:  # below its ridge point a side waits for the network
        for found in verdict.intensities.values():
            assert (found.flops_per_byte > found.ridge) == (verdict is fast)


@pytest.mark.parametrize(("attention", "ffn"), [(4, 4), (6, 2), (3, 5)])
def test_effective_ridge_points_follow_the_division_of_nics(attention: int, ffn: int) -> None:
    """2605.11005: 2 M / (M + N) and 2 N / (M + N) of a device's own, if each side had half of the NICs; here each rank
    has its own, so that the smaller side's carry what both can exchange."""
    asked = request(cluster=shapes.cluster(2, 4))
    candidate = next(ways(asked, Fitting(asked), Layout(attention=attention, ffn=ffn)))
    ridges = [found.ridge for found in judge(asked, candidate, []).intensities.values()]
    own = 989e12 / 50e9
    assert ridges == pytest.approx([own * attention / min(attention, ffn), own * ffn / min(attention, ffn)])


def test_collocated_layouts_are_predicted_across_and_inside_nodes() -> None:
    """Exposed transfers over a slow network cost most, overlapped ones less."""
    asked = request(cluster=shapes.cluster(4, 4, nic=10), parts=256, length=8192)
    found = {name: predict(asked) for name, predict in baselines().items()}
    seconds = {name: prediction.seconds for name, prediction in found.items() if prediction is not None}
    assert seconds["experts inside a node"] < seconds["experts across two nodes"]
    assert seconds["FlowMoE inside a node"] < seconds["experts inside a node"]
    assert seconds["DualPipe across two nodes"] < seconds["experts across two nodes"]
    alone = request(cluster=shapes.cluster(1, 4))
    assert baselines()["experts across two nodes"](alone) is None


def test_another_prediction_takes_the_place_of_a_formula() -> None:
    asked = request(layers=2)
    base = choose(asked, Effort())
    other = replace(base.verdict.collocated[0], name="simulated", seconds=1e-3)
    chosen = choose(asked, Effort(predict={"simulated": lambda _: other, "no room": lambda _: None}))
    assert chosen.verdict.collocated == (other,)
    assert not chosen.verdict.disaggregate


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    chosen = choose(request(layers=2), Effort(layouts=3))
    file = tmp_path / "plan.json"
    chosen.save(file)
    assert PlanChoice.load(file) == chosen


def test_plans_say_what_they_were_made_for() -> None:
    asked = request(layers=2, groups=(1,), choices=Choices(dedup="node", shard_optimizer=True))
    chosen = choose(asked, Effort(layouts=1, predict={}))
    assert chosen.others(asked.choices.options) == {}
    assert chosen.others(Choices().options) == {"dedup": "node", "optimizer_sharding": "torch or deepspeed"}
    content = json.loads(chosen.dumps())
    del content["options"]
    before = PlanChoice.loads(json.dumps(content), "a file from before they were kept")
    assert before.best == chosen.best and before.others(Choices().options) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version": 2', '"version": 1'), "has version 1, but this package reads 2"),
        (lambda text: text[:40], "is no plan: "),
        (lambda text: "[]", "is no plan: it has no version"),
        (lambda text: text.replace('"passes"', '"pusses"'), "is damaged: "),
        (lambda text: text.replace('"groups": ', '"groups": -'), "is damaged: groups=-1"),
    ],
    ids=["version", "cut", "list", "field", "value"],
)
def test_files_that_are_no_plans_are_refused(tmp_path: Path, change: object, message: str) -> None:
    file = tmp_path / "plan.json"
    choose(request(layers=2, groups=(1,)), Effort(layouts=1, predict={})).save(file)
    file.write_text(change(file.read_text()))  # type: ignore[operator]
    with pytest.raises(PlanError, match=message):
        PlanChoice.load(file)


def test_missing_plan_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan=.*nothing.json can't be read: No such file"):
        PlanChoice.load(tmp_path / "nothing.json")


def test_distinct_layers_keep_dense_ones_and_one_of_each_kind() -> None:
    model = distinct(shapes.model("deepseek_v3"))
    assert len(model.moe) == 1 and len(model.layers) > 1
    assert len(distinct(shapes.model("gpt_oss_120b")).layers) == 2


def test_ranks_that_exchange_much_share_nodes() -> None:
    """On two nodes of four with a slow network a plan lays both roles side by side, if it may."""
    asked = request("qwen3_paper", parts=16, cluster=shapes.cluster(2, 4, nic=20), groups=(1,), choices=Choices())
    free, fixed = choose(asked, Effort(predict={})), choose(replace(asked, neighbours=("roles",)), Effort(predict={}))
    assert free.best.layout.neighbours == "groups" and fixed.best.layout.neighbours == "roles"
    assert free.best.seconds < 0.9 * fixed.best.seconds
    assert "roles side by side" in free.best.layout.describe()
    assert PlanChoice.loads(free.dumps(), "text").best.layout == free.best.layout
    one_node = choose(request(), Effort(predict={}))
    assert all(candidate.layout.neighbours == "roles" for candidate in one_node.candidates), "nothing would change"
