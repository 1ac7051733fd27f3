"""The format of a checkpoint's tensors: any map of experts in, any other out, no rank reads what it does not own."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo

from lightning_afd.checkpoint import tensors
from lightning_afd.checkpoint.tensors import METADATA, Part, SavePlanner, TensorReader
from lightning_afd.errors import CheckpointError
from lightning_afd.expert_map import ExpertMap, ExpertRows

WEIGHT = ("state_dict", "layer.experts.down_proj")
MAPS = {
    "uneven": (0, 0, 0, 1, 1, 2, 2),
    "scattered": (2, 0, 1, 2, 0, 0, 1),
    "alternating": (0, 1, 0, 1, 0, 1, 0),
    "one rank": (0,) * 7,
    "one expert each": (6, 5, 4, 3, 2, 1, 0),
}


def save(trees: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """What `write_tensors` does on several ranks, one after another in this process."""
    folder.mkdir()
    writer, planners = dcp.FileSystemWriter(str(folder)), [SavePlanner() for _ in trees]
    for rank, (planner, tree) in enumerate(zip(planners, trees, strict=True)):
        planner.set_up_planner(dict(tree), None, rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writer.set_up_storage_writer(True)
    results = []
    for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)


def whole(experts: int) -> Tensor:
    """A stacked weight [E, 2, 3] of distinct numbers."""
    return torch.arange(experts * 6, dtype=torch.float32).view(experts, 2, 3)


def parts(weight: Tensor, expert_map: ExpertMap) -> list[Part]:
    """The weight by rank."""
    rows = [
        ExpertRows(expert_map.rank_to_experts(rank), len(weight)) for rank in range(max(expert_map.expert_to_rank) + 1)
    ]
    return [Part(weight[list(own.experts)], own) for own in rows]


def tree(value: Tensor | Part) -> dict[str, Any]:
    """A nested dict with one leaf."""
    return {WEIGHT[0]: {WEIGHT[1]: value}}


@pytest.mark.parametrize("written", MAPS)
@pytest.mark.parametrize("read", MAPS)
def test_any_map_is_read_under_any_other(tmp_path: Path, written: str, read: str) -> None:
    weight = whole(7)
    save([tree(part) for part in parts(weight, ExpertMap(MAPS[written]))], tmp_path / "c")
    reader = TensorReader(tmp_path / "c")
    assert reader.paths() == [WEIGHT] and reader.shape(WEIGHT) == (7, 2, 3)
    assert torch.equal(reader.read({WEIGHT: None})[WEIGHT], weight)
    for part in parts(weight, ExpertMap(MAPS[read])):
        assert torch.equal(reader.read({WEIGHT: part.rows})[WEIGHT], part.tensor)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True))
def test_runs_cover_each_expert_once(experts: list[int]) -> None:
    runs = ExpertRows(tuple(experts), 10).runs()
    assert [first + i for first, _, length in runs for i in range(length)] == experts
    assert [start for _, start, _ in runs] == [sum(length for *_, length in runs[:n]) for n in range(len(runs))]
    assert all(a[0] + a[2] != b[0] for a, b in pairwise(runs))


def test_replicas_write_one_copy_and_share_the_work(tmp_path: Path) -> None:
    state = {"state_dict": {f"dense {i}": torch.full((1000,), float(i)) for i in range(4)}}
    save([state, state], tmp_path / "c")
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.distcp")]
    assert len(sizes) == 2 and all(8000 < size < 12000 for size in sizes)
    assert float(TensorReader(tmp_path / "c").read({("state_dict", "dense 3"): None})["state_dict", "dense 3"][0]) == 3


def test_experts_that_nobody_holds_or_two_hold_differently_are_refused(tmp_path: Path) -> None:
    weight = whole(7)
    three = parts(weight, ExpertMap(MAPS["uneven"]))
    with pytest.raises(ValueError, match=r"layer.experts.down_proj invalid fill"):
        save([tree(three[0]), tree(three[2])], tmp_path / "hole")
    with pytest.raises(ValueError, match="overlapping"):
        save([tree(three[0]), tree(Part(weight[1:], ExpertRows(tuple(range(1, 7)), 7)))], tmp_path / "twice")
    with pytest.raises(ValueError, match="3 rows for 2 experts"):
        Part(weight[:3], ExpertRows((0, 1), 7))


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes of all pieces that a reader opens from now on."""
    opened: list[int] = []
    original = tensors._SafeReader._slice_file

    def counting(self: Any, file: Any, info: _StorageInfo) -> Any:
        opened.append(info.length)
        return original(self, file, info)

    monkeypatch.setattr(tensors._SafeReader, "_slice_file", counting)
    return lambda: sum(opened)


def test_a_rank_reads_its_own_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one rank had written all of them: in pieces."""
    weight = torch.randn(16, 64, 64)
    monkeypatch.setattr(tensors, "PIECE_BYTES", 2 * 64 * 64 * 4)
    save([tree(part) for part in parts(weight, ExpertMap((0,) * 16))], tmp_path / "c")
    read = count_bytes(monkeypatch)
    own = ExpertRows((4, 5, 12), 16)
    assert torch.equal(TensorReader(tmp_path / "c").read({WEIGHT: own})[WEIGHT], weight[list(own.experts)])
    assert 4 * 64 * 64 * 4 < read() < 5 * 64 * 64 * 4


def test_nothing_but_its_own_classes_is_unpickled(tmp_path: Path) -> None:
    save([tree(whole(2))], tmp_path / "c")

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    (tmp_path / "c" / METADATA).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        TensorReader(tmp_path / "c")
    assert not (tmp_path / "trapped").exists()
    (tmp_path / "c" / METADATA).unlink()
    with pytest.raises(CheckpointError, match="holds no tensors"):
        TensorReader(tmp_path / "c")


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    save([{"state_dict": {str(dtype): torch.ones(3, dtype=dtype) for dtype in dtypes}}], tmp_path / "c")
    reader = TensorReader(tmp_path / "c")
    for path, value in reader.read(dict.fromkeys(reader.paths())).items():
        assert str(value.dtype) == path[1] == str(reader.dtype(path)) and value.all()
