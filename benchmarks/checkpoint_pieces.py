"""What a checkpoint costs besides its bytes, at DeepSeek-V3's count of experts.

All ranks are played one after another by this process; the matrices are tiny, so that only the number of pieces counts.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from lightning_afd.checkpoint import tensors
from lightning_afd.checkpoint.tensors import METADATA, Part, SavePlanner, TensorReader
from lightning_afd.expert_map import ExpertMap, ExpertRows


def tree_of(layers: int, rows: ExpertRows) -> dict[str, Any]:
    """Weights and AdamW's state of one F rank."""
    names = [f"layers.{layer}.experts.{name}" for layer in range(layers) for name in ("gate_up_proj", "down_proj")]
    part = Part(torch.zeros(len(rows.experts), 2, 2), rows)
    state = {"exp_avg": part, "exp_avg_sq": part, "step": torch.zeros(())}
    return {"state_dict": dict.fromkeys(names, part), "optimizer_states": {"0": dict.fromkeys(names, state)}}


def measure(trees: list[dict[str, Any]], folder: Path) -> None:
    """Write and read once, and print seconds."""
    writer, planners = dcp.FileSystemWriter(str(folder)), [SavePlanner() for _ in trees]
    for rank, (planner, tree) in enumerate(zip(planners, trees, strict=True)):
        planner.set_up_planner(tree, None, rank == 0)
    plans = said("plans of all ranks", lambda: [planner.create_local_plan() for planner in planners])
    sys.stdout.write(f"{sum(len(plan.items) for plan in plans)} items, {len(trees)} ranks\n")
    merged, metadata = said("rank 0 joins the plans", lambda: planners[0].create_global_plan(plans))
    writer.set_up_storage_writer(True)
    work = list(zip(planners, writer.prepare_global_plan(merged), strict=True))
    write = lambda: [writer.write_data(planner.finish_plan(plan), planner).wait() for planner, plan in work]  # noqa: E731
    results = said("writing of all ranks", write)
    said("rank 0 describes the files", lambda: writer.finish(metadata, results))
    sys.stdout.write(f"{(folder / METADATA).stat().st_size / 1e6:8.1f} MB of description\n")
    reader = said("reading the description", lambda: TensorReader(folder))
    own = ExpertRows(tuple(range(16)), 256)
    wanted = {path: own if reader.shape(path)[:1] == (256,) else None for path in reader.paths()}
    said("reading 16 experts of each layer", lambda: reader.read(wanted))


def said(what: str, function: Callable[[], Any]) -> Any:
    """Run and print how long it took."""
    start = time.perf_counter()
    result = function()
    sys.stdout.write(f"{time.perf_counter() - start:8.2f} s  {what}\n")
    return result


def main() -> None:
    """Once with one piece per rank and tensor, or as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--per-expert", action="store_true", help="one piece per expert, as for experts of 64 MiB")
    options = parser.parse_args()
    if options.per_expert:
        tensors.PIECE_BYTES = 1
    expert_map = ExpertMap.contiguous(256, options.ranks)
    rows = [ExpertRows(expert_map.rank_to_experts(rank), 256) for rank in range(options.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        measure([tree_of(options.layers, own) for own in rows], Path(folder))


if __name__ == "__main__":
    main()
