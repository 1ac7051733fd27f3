"""DataLoaders with worker processes: the rows of one process, on attention ranks only; a worker that fails is named."""

import multiprocessing
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from cases import join, weights
from fits import Batch, Run, State, tiny_module, tokens, worst
from pool import RankPool, RemoteError
from torch.utils.data import DataLoader, Dataset, get_worker_info

RUN, REF = Run(layout="1A+1F"), Run(layout="ref")


class Rows(Dataset[Batch]):
    """Rows that each are made from their number; `bad` is one that cannot be made."""

    def __init__(self, rows: int, bad: int = -1) -> None:
        self._rows, self._bad = rows, bad

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Batch:
        if row == self._bad:
            raise LookupError("boom")
        info = get_worker_info()
        made = {name: value[0] for name, value in tokens(1, seed=row, masked=False).items()}
        return {**made, "worker": torch.tensor(-1 if info is None else info.id)}


@dataclass
class Seen(pl.Callback):
    """Worker processes of this rank, and which workers made its batches."""

    processes: list[set[int]] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        """Look at a batch, if this rank has one."""
        self.processes.append({child.pid or 0 for child in multiprocessing.active_children()})
        if isinstance(batch, dict):
            self.workers |= set(batch["worker"].tolist())


def loader(rows: Rows, workers: int) -> DataLoader[Batch]:
    """Batches of 8 rows in order; workers are forked, as in a script on Linux, and stay between epochs."""
    options: Any = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    return DataLoader(rows, 8, num_workers=workers, **options)


def two_fits(run: Run, workers: int) -> tuple[State, list[set[int]], set[int], int]:
    """Two epochs of two batches and then one more, with one DataLoader; how many processes are left behind it."""
    module, seen, data = tiny_module(layers=2), Seen(), loader(Rows(16), workers)
    module.train_dataloader = lambda: data  # type: ignore[method-assign, return-value, assignment]
    for epochs in (2, 1):
        run.trainer(max_epochs=epochs, callbacks=[seen]).fit(module)
    return weights(module), seen.processes, seen.workers, len(multiprocessing.active_children())


def test_rows_come_from_workers_that_only_attention_ranks_have(pool: RankPool) -> None:
    whole, *_ = pool.run(two_fits, 1, REF, 0)[0]
    attention, ffn = pool.run(two_fits, 2, RUN, 2)
    assert worst(join([attention[0], ffn[0]]), whole)[0] <= 1e-5
    _, processes, workers, left = attention
    assert workers == {0, 1} and left == 0
    first, second = processes[:4], processes[4:]
    assert all(len(seen) == 2 and seen == first[0] for seen in first)
    assert all(len(seen) == 2 and not seen & first[0] for seen in second)
    assert ffn[1:] == ([set()] * 6, set(), 0)


def fit_with_a_bad_row() -> None:
    """In the second batch, while the other worker goes on."""
    module = tiny_module(layers=2)
    data = loader(Rows(24, 9), 2)
    module.train_dataloader = lambda: data  # type: ignore[method-assign, return-value, assignment]
    RUN.trainer().fit(module)


def test_a_worker_that_fails_is_the_first_cause_on_all_ranks(pool: RankPool) -> None:
    """Workers are forks with copies of all sockets: left open, the other rank would wait until it is ended by force."""
    errors = pool.try_run(fit_with_a_bad_row, 2)
    assert all(isinstance(error, RemoteError) for error in errors)
    assert [error.type_name for error in errors] == ["LookupError", "PeerFailure"], errors
    assert "boom" in errors[0].message
    assert errors[1].message.startswith("rank 0 failed first with LookupError: ") and "boom" in errors[1].message
