from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_afd.errors import PlanError
from lightning_afd.expert_map import ExpertMap, split_sizes
from lightning_afd.placement import NEIGHBOURS, Layout, Worker

LAYOUTS = st.builds(
    Layout,
    attention=st.integers(1, 4),
    ffn=st.integers(1, 4),
    groups=st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3)),
    neighbours=st.sampled_from(NEIGHBOURS),
)


@pytest.mark.parametrize("name", ["A0", "F1", "A12"])
def test_worker_name_parses_back(name: str) -> None:
    assert str(Worker.parse(name)) == name


@pytest.mark.parametrize("name", ["", "A", "B0", "A0 ", "a0", "F-1"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no worker"):
        Worker.parse(name)


def test_workers_are_ordered() -> None:
    workers = [Worker("F", 0), Worker("A", 1), Worker("A", 0)]
    assert [str(worker) for worker in sorted(workers)] == ["A0", "A1", "F0"]


def test_layout_spelled_out() -> None:
    layout = Layout(attention=2, ffn=3, groups=2)
    assert layout.world == 10
    assert {str(worker): list(layout.ranks_of(worker)) for worker in layout.workers()} == {
        "A0": [0, 1],
        "A1": [2, 3],
        "F0": [4, 5, 6],
        "F1": [7, 8, 9],
    }
    assert layout.describe() == "2 x (2A + 3F)"
    assert Layout(attention=2, ffn=3).describe() == "2A + 3F"


def spelled_out(layout: Layout) -> str:
    """The worker of each rank."""
    return " ".join(str(layout.worker_of(rank)) for rank in range(layout.world))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(attention=2, ffn=2, neighbours="groups"), "A0 F0 A0 F0"),
        (Layout(attention=4, ffn=2, neighbours="groups"), "A0 A0 F0 A0 A0 F0"),
        (Layout(attention=1, ffn=3, neighbours="groups"), "A0 F0 F0 F0"),
        (Layout(attention=1, ffn=2, groups=2, neighbours="groups"), "A0 F0 F0 A1 F1 F1"),
        (Layout(attention=2, ffn=2, groups=(2, 1), neighbours="groups"), "A0 F0 A0 F0 A1 A1"),
        (Layout(attention=2, ffn=1, groups=(1, 2), neighbours="groups"), "A0 A0 F0 F1"),
    ],
)
def test_roles_of_a_group_may_take_turns(layout: Layout, ranks: str) -> None:
    assert spelled_out(layout) == ranks


@given(attention=st.integers(1, 16), ffn=st.integers(1, 16), node=st.integers(1, 8))
def test_every_node_has_both_roles_in_proportion(attention: int, ffn: int, node: int) -> None:
    layout = Layout(attention=attention, ffn=ffn, neighbours="groups")
    world = attention + ffn
    for start in range(0, world - world % node, node):
        own = [layout.worker_of(rank).role for rank in range(start, start + node)].count("A")
        assert abs(own - node * attention / world) < 1


def test_other_neighbours_are_refused() -> None:
    with pytest.raises(PlanError, match="neighbours='nodes': choose one of roles, groups"):
        Layout(attention=1, ffn=1, neighbours="nodes")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a collocated layout cannot have neighbours='groups'"):
        Layout(attention=2, ffn=2, collocated=True, neighbours="groups")


def test_roles_may_have_different_numbers_of_groups() -> None:
    layout = Layout(attention=1, ffn=2, groups=(2, 1))
    assert layout.world == 4
    assert {str(worker): list(layout.ranks_of(worker)) for worker in layout.workers()} == {
        "A0": [0],
        "A1": [1],
        "F0": [2, 3],
    }
    assert layout.describe() == "2 x 1A + 1 x 2F"
    on_ffn = Layout(attention=2, ffn=1, groups=(1, 3), head="ffn")
    assert on_ffn.describe() == "1 x 2A + 3 x 1F, head on F"
    assert [on_ffn.tail_rank(replica) for replica in (0, 1)] == [4, 4]
    with pytest.raises(PlanError, match=r"groups=\(2, 1\): costs and plans are known for as many attention groups as"):
        _ = layout.depth


@pytest.mark.parametrize(
    ("given", "groups"), [((2, 2), 2), ([2, 1], (2, 1)), ("2,1", (2, 1)), ("[1, 3]", (1, 3)), ("2", 2), ((3,), 3)]
)
def test_groups_are_read_in_all_their_forms(given: Any, groups: Any) -> None:
    assert Layout(attention=1, ffn=1, groups=given) == Layout(attention=1, ffn=1, groups=groups)
    assert Layout(attention=1, ffn=1, groups=given).groups == groups


@pytest.mark.parametrize("given", [(), (1, 2, 3), "two", "1.5", 1.5, (1, None), True, None])
def test_other_groups_are_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="give one number for both roles, or a pair"):
        Layout(attention=1, ffn=1, groups=given)
    with pytest.raises(PlanError, match=r"groups=\(1, 0\): at least 1 is needed"):
        Layout(attention=1, ffn=1, groups=(1, 0))


def test_tails_on_ffn_are_shared_out_over_the_last_group() -> None:
    few = Layout(attention=3, ffn=2, groups=2, head="ffn")
    assert [few.tail_rank(replica) for replica in range(3)] == [8, 9, 8]
    assert [few.tails_of(rank) for rank in range(10)] == [()] * 8 + [(0, 2), (1,)]
    assert [few.copies_of(rank) for rank in (0, 4, 6, 8, 9)] == [
        range(3),
        range(3, 6),
        range(6, 8),
        range(8, 10),
        range(8, 10),
    ]
    many = Layout(attention=2, ffn=3, head="ffn")
    assert [many.copies_of(rank) for rank in range(2, 5)] == [range(2, 4), range(2, 4), range(4, 5)]
    assert few.describe() == "2 x (3A + 2F, head on F)"
    plain = Layout(attention=3, ffn=2, groups=2)
    assert [plain.tail_rank(replica) for replica in range(3)] == [plain.first_rank(replica) for replica in range(3)]
    with pytest.raises(PlanError, match="head='F': choose one of attention, ffn"):
        Layout(attention=1, ffn=1, head="F")  # type: ignore[arg-type]


@given(layout=LAYOUTS)
def test_every_rank_has_one_place(layout: Layout) -> None:
    ranks = [rank for worker in layout.workers() for rank in layout.ranks_of(worker)]
    assert sorted(ranks) == list(range(layout.world)) and ranks[0] == 0
    assert all(list(layout.ranks_of(worker)) == sorted(layout.ranks_of(worker)) for worker in layout.workers())
    for rank in ranks:
        assert layout.ranks_of(layout.worker_of(rank))[layout.index_of(rank)] == rank


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_are_refused(rank: int) -> None:
    with pytest.raises(PlanError, match=f"rank {rank} is outside of the layout's 4 ranks"):
        Layout(attention=2, ffn=2).worker_of(rank)


@pytest.mark.parametrize("name", ["attention", "ffn", "groups"])
def test_sizes_are_checked(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}=0"):
        Layout(**{"attention": 1, "ffn": 1, "groups": 1} | {name: 0})


def test_uneven_experts_are_split_into_contiguous_runs() -> None:
    experts = ExpertMap.contiguous(7, 3)
    assert experts.expert_to_rank == (0, 0, 0, 1, 1, 2, 2)
    assert [experts.rank_to_experts(rank) for rank in range(3)] == [(0, 1, 2), (3, 4), (5, 6)]
    assert experts.local_ids() == (0, 1, 2, 0, 1, 0, 1)


def test_more_ranks_than_experts_leaves_ranks_empty() -> None:
    assert split_sizes(2, 4) == [1, 1, 0, 0]
    assert ExpertMap.contiguous(2, 4).rank_to_experts(3) == ()


@given(expert_to_rank=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_local_ids_count_within_the_owner(expert_to_rank: list[int]) -> None:
    experts = ExpertMap(tuple(expert_to_rank), version=3)
    for expert, (rank, local) in enumerate(zip(experts.expert_to_rank, experts.local_ids(), strict=True)):
        assert experts.rank_to_experts(rank)[local] == expert
    assert sum(len(experts.rank_to_experts(rank)) for rank in range(4)) == experts.experts


def test_collocated_ranks_have_both_roles() -> None:
    layout = Layout.together(3)
    assert layout.world == 3 and layout.describe() == "3 collocated"
    assert [layout.workers_of(rank) for rank in range(3)] == [(Worker("A", 0), Worker("F", 0))] * 3
    assert [layout.index_of(rank) for rank in range(3)] == [0, 1, 2]
    assert layout.ranks_of(Worker("A", 0)) == layout.ranks_of(Worker("F", 0)) == layout.copies_of(1) == range(3)
    assert [layout.tails_of(rank) for rank in range(3)] == [(0,), (1,), (2,)]
    assert (layout.name_of(2), Layout(attention=1, ffn=2).name_of(2)) == ("rank 2 (A0, F0)", "rank 2 (F0)")
    with pytest.raises(PlanError, match="rank 3 is outside of the layout's 3 ranks"):
        layout.workers_of(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn": 3}, "attention=2 and ffn=3: its ranks have both roles"),
        ({"groups": 2}, "cannot have groups=2, .* use groups=1"),
        ({"head": "ffn"}, "cannot have head='ffn', .* use head='attention'"),
    ],
)
def test_collocated_layout_refuses_what_only_separate_ranks_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Layout(**{"attention": 2, "ffn": 2, "collocated": True, **change})
