"""Loaders without a length or of unequal length: all ranks go through the same batches (D7), and stop together."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import join, weights
from fits import Batch, Run, State, share, tiny_module, tokens, worst
from pool import RankPool
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_afd.errors import PlanError
from lightning_afd.strategies.loaders import NoBatch, Place, UnsizedLoader, has_no_rows, share_loader
from lightning_afd.strategies.samplers import use_own_batches


class Stream(IterableDataset[Batch]):
    """Ready batches without a length."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.batches)


BATCHES = [tokens(8, seed=seed, masked=False) for seed in range(4)]
VALIDATION = [tokens(4, seed=seed, masked=False) for seed in range(10, 13)]


def streams(
    run: Run, kind: type[Stream], epochs: int, accumulated: int
) -> tuple[int, int, list[float], State, list[str]]:
    """D7: A0 has 4 batches and A1 has 3; validation is uneven the other way.

    One device has the same 3 global batches. Returns steps, epochs, losses, weights and warnings.
    """
    module = tiny_module(layers=2)
    replicas = {"num_replicas": 1, "rank": 0} if run.layout == "ref" else {"num_replicas": 2, "rank": -1}

    def loader(batches: list[Batch], short: int) -> DataLoader[Batch]:
        own = getattr(module.trainer.strategy, "distributed_sampler_kwargs", None) or replicas
        mine = [share(batch, own["num_replicas"], own["rank"]) for batch in batches]
        return DataLoader(kind(mine[:3] if own["rank"] == short else mine), batch_size=None)

    def evaluated() -> DataLoader[Batch]:
        everything = loader(VALIDATION, 9)
        rank = 0 if run.layout == "ref" else module.trainer.strategy.distributed_sampler_kwargs["rank"]
        rows = everything.dataset.batches  # type: ignore[attr-defined]
        return DataLoader(kind(rows[:1] if rank == 0 and run.layout != "ref" else rows), batch_size=None)

    module.train_dataloader = lambda: loader(BATCHES, 0 if run.layout == "ref" else 1)  # type: ignore[method-assign]
    module.val_dataloader = evaluated  # type: ignore[method-assign]
    trainer = run.trainer(max_epochs=epochs, accumulate_grad_batches=accumulated, limit_val_batches=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    losses = [float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss")]
    uneven = [str(warning.message) for warning in caught if "attention rank" in str(warning.message)]
    return trainer.global_step, trainer.current_epoch, losses, weights(module), uneven


@pytest.mark.parametrize(
    ("kind", "fit", "done"), [(Stream, (1, 1), (3, 1)), (Stream, (2, 2), (4, 2)), (SizedStream, (2, 2), (4, 2))]
)
def test_d7_uneven_streams(pool: RankPool, kind: type[Stream], fit: tuple[int, int], done: tuple[int, int]) -> None:
    """Epochs and accumulated batches of a fit; its steps and epochs."""
    steps, epochs, losses, whole, _ = pool.run(streams, 1, Run(layout="ref"), kind, *fit)[0]
    ranks = pool.run(streams, 4, Run(), kind, *fit)
    assert (steps, epochs) == done
    assert worst(join([rank[3] for rank in ranks]), whole)[0] <= 1e-5
    for number, rank in enumerate(ranks):
        assert rank[:2] == (steps, epochs)
        assert rank[2][0] == pytest.approx(losses[0], rel=1e-5)
        assert rank[2] == ranks[0][2]
        assert len(rank[4]) == (1 if number == 0 else 0), rank[4]


# -- without processes ---------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """0, 1, 2 ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def place(training: bool, heads: list[list[float]], *, is_attention: bool = True, replica: int = 0) -> Place:
    """A rank whose collectives answer with its own numbers followed by the next entry of `heads`."""
    answers = iter(heads)

    def gather(mine: list[float]) -> list[list[float]]:
        return [mine, [1.0, *next(answers)]]

    return Place(replicas=2, replica=replica, is_attention=is_attention, training=training, gather=gather)


class Counted:
    """A stateful stream of `count` numbers."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0

    def __iter__(self) -> Iterator[int]:
        while self.done < self.count:
            self.done += 1
            yield self.done
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        """Numbers handed out."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind them."""
        self.done = state["done"]


def test_training_stops_with_the_shortest_rank_and_evaluation_with_the_longest() -> None:
    with pytest.warns(UserWarning, match="between 2 and 3 batches: every rank stops after 2"):
        shorter = share_loader([1, 2, 3], place(True, [[2.0, 0.0]]))
    assert list(shorter) == [1, 2] and len(shorter) == 2
    longer = list(share_loader([1, 2], place(False, [[3.0, 0.0]])))
    assert longer[:2] == [1, 2] and isinstance(longer[2], NoBatch)
    with pytest.warns(UserWarning, match="no batch after 2"):
        assert list(share_loader(Counted(3), place(True, [[-1.0, 1.0], [1.0], [1.0], [0.0]]))) == [1, 2]
    evaluated = share_loader(Counted(1), place(False, [[-1.0, 1.0], [1.0], [1.0], [0.0]]))
    assert [isinstance(batch, NoBatch) for batch in evaluated] == [False, True]
    assert evaluated.batches == 1


def test_an_f_rank_has_as_many_batches_and_no_rows() -> None:
    stand_in = share_loader([1, 2, 3], place(True, [[2.0, 1.0]], is_attention=False))
    assert all(isinstance(batch, NoBatch) for batch in stand_in) and len(stand_in) == 2
    assert stand_in.state_dict() == {}


def test_a_loader_that_ends_early_is_refused() -> None:
    class Liar(list[int]):
        def __len__(self) -> int:
            return 3

    with pytest.raises(PlanError, match=r"ended after 2 batches, but its len\(\) promised 3"):
        list(share_loader(Liar([1, 2]), place(True, [[3.0, 0.0]])))


def test_the_state_of_a_stream_leaves_out_the_batch_that_is_fetched_ahead() -> None:
    loader = share_loader(Counted(4), place(True, [[-1.0, 1.0], *[[1.0]] * 4, [0.0]]))
    assert isinstance(loader, UnsizedLoader)
    batches = iter(loader)
    fetched = [next(batches), next(batches), next(batches)]  # Lightning trains on 2 while it holds 3
    assert fetched == [1, 2, 3] and loader.state_dict() == {"done": 2}
    again = share_loader(Counted(4), place(True, [[-1.0, 1.0], *[[1.0]] * 2, [0.0]]))
    again.load_state_dict(loader.state_dict())
    assert list(again) == [3, 4]


def test_parts_of_a_batch_from_several_loaders() -> None:
    assert has_no_rows({"a": [NoBatch()], "b": None}) and has_no_rows([NoBatch(), 1])
    assert not has_no_rows({"a": torch.ones(1), "b": [2, (3, None)], "c": "text"})


@pytest.mark.parametrize("rows", [1, 4, 7, 8, 11])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_the_batches_of_one_device(rows: int, shuffle: bool) -> None:
    whole = DataLoader(Numbers(rows), 2, sampler=DistributedSampler(Numbers(rows), 1, 0, shuffle=shuffle, seed=3))
    parts = []
    for rank in range(3):
        sampler: Any = DistributedSampler(Numbers(rows), 3, rank, shuffle=shuffle, seed=3)
        loader = DataLoader(Numbers(rows), 2, sampler=sampler)
        use_own_batches(loader, 3, rank)
        parts.append([batch.tolist() for batch in loader])
        assert len(loader) == len(parts[-1])
    for number, batch in enumerate(whole):
        assert parts[number % 3][number // 3] == batch.tolist()
    assert sum(map(len, parts)) == len(whole)


def test_samplers_of_the_user_stay() -> None:
    class Own(BatchSampler):
        """By some rule of the user's."""

    other_ranks = DataLoader(Numbers(4), 2, sampler=DistributedSampler(Numbers(4), 4, 1, shuffle=False))
    random = DataLoader(Numbers(4), 2, sampler=RandomSampler(range(4)))
    sampler: Any = DistributedSampler(Numbers(4), 2, 0, shuffle=False)
    own = DataLoader(Numbers(4), batch_sampler=Own(sampler, 2, False))
    for loader in (other_ranks, random, own, [1, 2], DataLoader(Stream([]), batch_size=None)):
        before = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        use_own_batches(loader, 2, 0)
        assert getattr(getattr(loader, "batch_sampler", None), "sampler", None) is before
