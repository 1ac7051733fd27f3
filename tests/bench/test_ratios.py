"""Arithmetic of repetitions, and names and settings of a run."""

import math
from typing import Any

import pytest

from lightning_afd.bench import machine
from lightning_afd.bench.conditions import Condition, bits_of, parse_condition
from lightning_afd.bench.names import parse
from lightning_afd.bench.ratios import Bound, Spread, busiest_bytes, disagreement, paired, ring_bytes
from lightning_afd.bench.result import Measured, Section
from lightning_afd.bench.settings import Settings, title_of
from lightning_afd.bench.tables import Grid
from lightning_afd.errors import PlanError


def test_ratios_are_those_of_each_repetition() -> None:
    slower_and_slower = [1.0, 2.0, 4.0, 8.0]
    ratio = paired([2 * seconds for seconds in slower_and_slower], slower_and_slower)
    assert ratio == Spread(2.0, 2.0, 2.0, 4)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(2.0, 3.0, 4.0, 5)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert f"{Spread(1.0, 1.5, 2.0, 3):.1f}" == "1.5 (1.0 to 2.0)"
    with pytest.raises(PlanError, match="2 and 1 repetitions are no pairs"):
        paired([1.0, 2.0], [1.0])
    with pytest.raises(PlanError, match="no repetition"):
        Spread.of([])


def test_bound_is_the_longest_of_its_parts() -> None:
    compute = {"A R=4": 0.7, "F R=4": 0.5}
    assert Bound(compute=compute, wire=0.6).seconds == 0.7
    assert Bound(compute=compute, wire=0.6).by == "A R=4"
    slow = Bound(compute=compute, wire=35e6 / (0.957 * 250e6 / 8))
    assert (slow.by, round(slow.seconds, 2)) == ("wire", 1.17)


def test_bytes_count_in_the_busiest_direction() -> None:
    incast = [{2: 10}, {2: 20}, {0: 1, 1: 2}]  # two ranks send to one
    assert busiest_bytes(incast) == 30
    assert busiest_bytes([{1: 7, 2: 8}, {}, {}]) == 15
    assert ring_bytes(100.0, 2) == 100.0
    assert ring_bytes(100.0, 4) == 150.0


def test_losses_of_the_same_step_are_compared() -> None:
    assert disagreement({"afd": [4.0, 3.0], "ep": [4.0, 3.0, 2.0]}) == 0.0
    assert disagreement({"afd": [4.0, 3.0], "ep": [4.0, 3.0], "x": [4.0, 3.3]}) == pytest.approx(0.1)
    assert disagreement({"alone": [1.0]}) == 0.0


def measured(name: str, seconds: list[float], **values: Any) -> Measured:
    return Measured(name=name, plan="", seconds=seconds, losses=[1.0], **values)


def test_section_says_how_fast_the_first_one_is() -> None:
    first = measured("afd", [1.0, 2.0, 1.0], bounds=[0.8, 1.6, 0.8])
    section = Section(rate="500mbit", measured=[first, measured("ep", [1.5, 3.0, 1.5])], link_rates=[1.0], compute={})
    assert section.ratio("ep").median == 1.5
    assert section.summary == "500mbit: afd 1.000 s a step, 1.25 x its bound; speed: 1.50x ep"
    other = measured("x", [1.0], same_weights=False)
    other.losses[0] = math.inf
    section.measured.append(other)
    assert section.disagreement == 0.0, "another system's own weights do not have to agree"


@pytest.mark.parametrize(
    ("rate", "measured", "problem"),
    [
        ("500mbit", 0.479e9, False),
        ("500mbit", 3e9, True),
        ("500mbit; rank 1 at 100mbit", 0.096e9, False),
        ("500mbit; rank 1 slowed to 50%", 0.2e9, False),
        ("unshaped", 9e9, False),
        ("network as it is", 9e9, False),
    ],
)
def test_links_must_have_their_rates(rate: str, measured: float, problem: bool) -> None:
    section = Section(rate=rate, measured=[], link_rates=[measured / 8], compute={})
    assert bool(section.rate_problem) == problem


@pytest.mark.parametrize(
    "name", ["afd", "afd:8", "afd/zero-bubble:8", "ep", "ep+nodedup", "flowmoe:2+nodedup", "experts-only"]
)
def test_names_parse_back(name: str) -> None:
    spec = parse(name)
    assert spec is not None
    assert str(spec) == name
    assert parse(str(spec)) == spec


def test_names_mean_layouts_and_micro_batches() -> None:
    afd, ep = parse("afd"), parse("ep")
    assert afd is not None and ep is not None
    assert afd.layout(2, 1).describe() == "2A + 1F"
    assert ep.layout(2, 1).describe() == "3 collocated"
    assert (afd.counted(4).micro_batches, ep.counted(4).micro_batches) == (4, 1)
    assert parse("deepspeed-moe") is None
    with pytest.raises(PlanError, match="contender afd/flowmoe: order flowmoe is not a choice; choices: best"):
        parse("afd/flowmoe")
    with pytest.raises(PlanError, match="contender afd:0: 0 micro-batches"):
        parse("afd:0")


def test_rates_are_bits_per_second() -> None:
    assert [bits_of(rate) for rate in ("500mbit", "1gbit", "2.5gbit", "unshaped")] == [5e8, 1e9, 2.5e9, None]
    for wrong in ("500", "0mbit", "fast"):
        with pytest.raises(PlanError, match=f"rate {wrong}: write unshaped, or a number"):
            bits_of(wrong)


def test_conditions_name_a_rank_that_is_slower() -> None:
    assert parse_condition("500mbit") == Condition(rate=5e8)
    assert parse_condition("1gbit; rank 1 at 100mbit") == Condition(rate=1e9, rank=1, its_rate=1e8)
    assert parse_condition("unshaped; rank 0 slowed to 50%") == Condition(rate=None, rank=0, its_share=0.5)
    for wrong in ("1gbit; rank 0", "1gbit; rank 0 slowed to 0%", "1gbit; rank 0 at 1gbit; rank 1 at 1gbit"):
        with pytest.raises(PlanError, match=f"rate {wrong}: behind the semicolon write"):
            parse_condition(wrong)


def test_sweeps_are_combinations_divided_by_ranks() -> None:
    sweep = [{"attention": [1, 2], "workload.top_k": [2, 4]}, {"micro_batches": 1}]
    settings = Settings.read({**GOOD, "sweep": sweep})
    assert len(settings.cells()) == 5
    assert title_of(settings.cells()[1]) == "attention 1, top_k 4"
    at = settings.at(settings.cells()[1])
    assert (at.attention, at.workload["top_k"], at.sweep) == (1, 4, [])
    runs = settings.by_world()
    assert [(run.attention, len(run.cells())) for run in runs] == [(1, 3), (2, 2)]
    assert [cell for run in runs for cell in run.cells()].count({"micro_batches": 1}) == 1
    with pytest.raises(PlanError, match="sweep: depth is not a choice; choices: attention, ffn, micro_batches, "):
        Settings.read({**GOOD, "sweep": [{"depth": [1]}]})
    with pytest.raises(PlanError, match=r"workload.sequences=8 for 10 ranks"):
        Settings.read({**GOOD, "sweep": [{"attention": [9]}]})


SIZES = dict.fromkeys(
    ("layers", "hidden", "heads", "experts", "top_k", "width", "vocabulary", "seq_len", "sequences"), 8
)
GOOD: dict[str, Any] = {
    "attention": 1,
    "ffn": 1,
    "micro_batches": 4,
    "contenders": ["afd"],
    "rates": [],
    "repetitions": 7,
    "workload": SIZES,
    "output_dir": ".",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn": 0}, "ffn=0 is not a whole number of at least 1"),
        ({"contenders": []}, "contenders=.*name at least one, "),
        ({"rates": ["quick"]}, "rate quick"),
        ({"workload": {**SIZES, "sequences": 1}}, "workload.sequences=1 for 2 ranks"),
        ({"workload": {**SIZES, "hidden": "wide"}}, "workload.hidden=wide is not"),
        ({"workload": {**SIZES, "skew": -1}}, "workload.skew=-1 is not a number of at least 0"),
        ({"picture": "film"}, "picture=film is not a choice; choices: map, lines"),
        ({"device": "tpu"}, "device=tpu is not a choice"),
        ({"rates": ["1gbit"], "device": "cuda"}, "device=cpu"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    Settings.read({**GOOD, "workload": {**SIZES, "width": "balanced"}})
    with pytest.raises(PlanError, match=message):
        Settings.read({**GOOD, **change})


def test_a_table_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="steps: a row has another number of cells than 2 columns"):
        Grid(title="steps", columns=("contender", "loss"), rows=(("afd", "6.2", "1 %"),))


def test_interrupts_are_work_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have them in their own time, so that others would seem to work for less than no time."""
    monkeypatch.setattr(machine, "_lines", lambda path: ["cpu  100 20 30 9999 9999 4 6 9999 0 0", "cpu0 1"])
    assert machine.busy_seconds() == pytest.approx(1.6)
    monkeypatch.setattr(machine, "_lines", lambda path: [])
    assert machine.busy_seconds() == 0
