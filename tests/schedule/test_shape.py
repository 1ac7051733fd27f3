import dataclasses

import pytest

from lightning_afd.errors import PlanError
from lightning_afd.placement import Worker
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import build
from lightning_afd.schedule.shape import Schedule, Shape

# Three layers on two groups with router logits: A0 has the segments 0, 2 and the tail 3; A1 has segment 1.
RULE = """
A0f0:
D0f0: A0f0
H0f0: A0f0
E0f0: D0f0
C0f0: E0f0
A1f0: C0f0 H0f0
D1f0: A1f0
H1f0: A1f0
L1f0: A1f0
E1f0: D1f0
C1f0: E1f0
A2f0: C1f0 H1f0
D2f0: A2f0
E2f0: D2f0
C2f0: E2f0
A3f0: C2f0 A2f0 L1f0
A3b0: A3f0
D2b0: A3b0
E2b0: D2b0 E2f0
C2b0: E2b0
E2w0: E2b0
A2b0: A2f0 C2b0 A3b0
D1b0: A2b0
H1b0: A2b0
L1b0: A3b0
E1b0: D1b0 E1f0
C1b0: E1b0
E1w0: E1b0
A1b0: A1f0 C1b0 H1b0 L1b0
D0b0: A1b0
H0b0: A1b0
E0b0: D0b0 E0f0
C0b0: E0b0
E0w0: E0b0
A0b0: A0f0 C0b0 H0b0
"""
PLACES = """
A0f0 A0 | A1f0 A1 | A2f0 A0 | A3f0 A0 | A3b0 A0 | E0f0 F0 | E1w0 F1 | E2b0 F0
D0f0 A0 F0 | D1f0 A1 F1 | D2f0 A0 F0 | C0f0 F0 A1 | C1f0 F1 A0 | C2f0 F0 A0
D0b0 A1 F0 | D1b0 A0 F1 | D2b0 A0 F0 | C0b0 F0 A0 | C1b0 F1 A1 | C2b0 F0 A0
H0f0 A0 A1 | H1f0 A1 A0 | H0b0 A1 A0 | H1b0 A0 A1 | L1f0 A1 A0 | L1b0 A0 A1
"""


def example(micro_batches: int = 1) -> Shape:
    return Shape(layers=3, groups=2, micro_batches=micro_batches, router_logits=True)


def test_dependency_rule_spelled_out() -> None:
    shape = example()
    lines = [f"{action}: {' '.join(map(str, shape.dependencies(action)))}".strip() for action in shape.actions()]
    assert lines == RULE.strip().splitlines()


def test_places_spelled_out() -> None:
    shape = example()
    for entry in PLACES.replace("\n", "|").split("|"):
        if entry.strip():
            name, *workers = entry.split()
            assert [str(worker) for worker in shape.places(Action.parse(name))] == workers, name


# The same with the tail on F1: A0 hands hidden states over behind the last layer, router logits of all layers go to F1.
HANDED_OVER = """
A3f0: C2f0 A2f0
H3f0: A3f0
T3f0: H3f0 L0f0 L1f0 L2f0
T3b0: T3f0
H3b0: T3b0
A3b0: A3f0 H3b0
D2b0: A3b0
L2b0: T3b0
A2b0: A2f0 C2b0 A3b0 L2b0
L0b0: T3b0
A0b0: A0f0 C0b0 H0b0 L0b0
"""


def test_tail_on_ffn_spelled_out() -> None:
    shape = dataclasses.replace(example(), head="ffn")
    lines = [f"{action}: {' '.join(map(str, shape.dependencies(action)))}".strip() for action in shape.actions()]
    added = [line for line in HANDED_OVER.strip().splitlines() if line not in lines]
    assert added == []
    names = {line.partition(":")[0] for line in [*RULE.strip().splitlines(), *HANDED_OVER.strip().splitlines()]}
    assert {line.partition(":")[0] for line in lines} == names | {"L0f0", "L2f0"}
    places = {
        "T3f0": "F1",
        "T3b0": "F1",
        "A3f0": "A0",
        "H3f0": "A0 F1",
        "H3b0": "F1 A0",
        "L2f0": "A0 F1",
        "L1b0": "F1 A1",
    }
    for name, workers in places.items():
        assert " ".join(map(str, shape.places(Action.parse(name)))) == workers, name


def test_split_attention_spelled_out() -> None:
    whole = example()
    split = dataclasses.replace(whole, split_attention=True)
    added = [action for action in split.actions() if action not in set(whole.actions())]
    assert [str(action) for action in added] == ["A3w0", "A2w0", "A1w0", "A0w0"]
    assert [str(*split.dependencies(action)) for action in added] == ["A3b0", "A2b0", "A1b0", "A0b0"]
    with pytest.raises(ValueError, match="A0w0 has no meaning"):
        whole.dependencies(Action("A", 0, "w", 0))
    # The segment that hands over to a tail on F has no weights.
    handing = dataclasses.replace(split, head="ffn")
    assert [action.layer for action in handing.actions() if (action.op, action.phase) == ("A", "w")] == [2, 1, 0]


def test_actions_come_once_and_after_what_they_wait_for() -> None:
    shape = example(micro_batches=3)
    seen: set[Action] = set()
    for action in shape.actions():
        assert action not in seen
        assert seen.issuperset(shape.dependencies(action))
        seen.add(action)
    assert len(seen) == 3 * len(RULE.strip().splitlines())


def test_producers_look_through_transfers() -> None:
    assert [str(action) for action in example().producers(Action.parse("A3f0"))] == ["E2f0", "A2f0", "A1f0"]


def test_one_group_needs_neither_hops_nor_logits() -> None:
    shape = Shape(layers=3, micro_batches=1, router_logits=True)
    assert {action.op for action in shape.actions()} == set("AEDC")


def test_one_attention_group_needs_no_hops_to_several_groups_of_experts() -> None:
    shape = Shape(layers=3, groups=(1, 2), micro_batches=1, router_logits=True)
    assert {action.op for action in shape.actions()} == set("AEDC")
    assert [str(shape.experts(layer)) for layer in range(3)] == ["F0", "F1", "F0"]
    assert [" ".join(map(str, shape.places(Action("D", layer, "b", 0)))) for layer in (0, 1)] == ["A0 F0", "A0 F1"]


def test_one_group_of_experts_serves_several_attention_groups() -> None:
    shape = Shape(layers=3, groups=(2, 1), micro_batches=1)
    assert [str(action) for action in shape.actions() if action.op == "H"] == ["H0f0", "H1f0", "H1b0", "H0b0"]
    places = {"D0f0": "A0 F0", "C0f0": "F0 A1", "D1f0": "A1 F0", "C1f0": "F0 A0", "C1b0": "F0 A1", "D0b0": "A1 F0"}
    for name, workers in places.items():
        assert " ".join(map(str, shape.places(Action.parse(name)))) == workers, name


def test_a_single_layer_leaves_the_second_group_without_work() -> None:
    shape = Shape(layers=1, groups=2, micro_batches=1)
    assert [str(action) for action in shape.actions() if action.op == "H"] == []
    assert shape.attention(1) == Worker("A", 0)
    assert build("af-pipe", shape).programs[Worker("A", 1)] == ()


def test_meaningless_actions_have_no_dependencies() -> None:
    with pytest.raises(ValueError, match="D0w0 has no meaning"):
        example().dependencies(Action("D", 0, "w", 0))


@pytest.mark.parametrize("name", ["layers", "groups", "micro_batches"])
def test_sizes_are_checked(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}=0"):
        Shape(**{"layers": 1, "groups": 1, "micro_batches": 1} | {name: 0})  # type: ignore[arg-type]


def test_fields_are_frozen() -> None:
    names = [field.name for field in dataclasses.fields(Shape)]
    assert names == ["layers", "groups", "micro_batches", "router_logits", "head", "split_attention", "spreads"]
    assert all(field.kw_only for field in dataclasses.fields(Shape))
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().layers = 4  # type: ignore[misc]


def test_digest_is_stable() -> None:
    digest = build("af-pipe", example(4)).digest()
    assert digest == build("af-pipe", example(4)).digest()
    # A literal, so that a process with another hash seed would be noticed; it may change with the orders.
    assert build("sequential", Shape(layers=1, micro_batches=1)).digest() == SEQUENTIAL_DIGEST


SEQUENTIAL_DIGEST = "0136ea5b89541ba2fdf51eabc161511b0b67b71665ff85869bcac29d728b285e"


def _swapped(schedule: Schedule, worker: Worker) -> Schedule:
    first, second, *rest = schedule.programs[worker]
    return dataclasses.replace(schedule, programs={**schedule.programs, worker: (second, first, *rest)})


def test_digest_changes_with_anything() -> None:
    schedule = build("af-pipe", example(4))
    sizes = (
        {"layers": 4},
        {"groups": 1},
        {"micro_batches": 5},
        {"router_logits": False},
        {"head": "ffn"},
        {"split_attention": True},
    )
    others = [dataclasses.replace(schedule, shape=dataclasses.replace(schedule.shape, **size)) for size in sizes]
    others += [_swapped(schedule, worker) for worker in schedule.programs]
    others.append(dataclasses.replace(schedule, order="layer-major"))
    digests = {schedule.digest(), *(other.digest() for other in others)}
    assert len(digests) == 1 + len(others)


def test_digest_ignores_the_order_in_which_workers_were_listed() -> None:
    schedule = build("af-pipe", example())
    backwards = dict(reversed(list(schedule.programs.items())))
    assert dataclasses.replace(schedule, programs=backwards).digest() == schedule.digest()


def test_grid_has_a_line_per_worker_and_marks_places() -> None:
    schedule = build("sequential", Shape(layers=1, micro_batches=1))
    assert str(schedule).splitlines() == [
        " A0 | A0f0  D0f0  C0f0  A1f0  A1b0  D0b0  C0b0  A0b0",
        " F0 | D0f0  E0f0  C0f0  D0b0  E0b0  C0b0  E0w0",
    ]
    places = {Worker("A", 0): 2, Worker("F", 0): 7}
    assert schedule.grid(places, around=1).splitlines() == [" A0 | D0f0 [C0f0] A1f0", " F0 | E0w0 [end]"]
