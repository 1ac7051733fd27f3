"""Algorithm 1 at the start of a fit, with times that are known: rank 0 searches, the others follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_cases import cluster, model
from torch import nn

from lightning_afd.allocate.calibration import Calibration
from lightning_afd.allocate.choose import Effort
from lightning_afd.allocate.replica import Replicas, choose_for_replicas
from lightning_afd.allocate.request import RUNGS, Request
from lightning_afd.cost.job import BatchShape, Choices
from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.strategies.config import AFDConfig
from lightning_afd.strategies.planning import decide
from lightning_afd.strategies.planning.options import Planning
from lightning_afd.strategies.planning.trials import Scale, Trials, Tried, with_few_layers

WORLD = 4
LAYOUTS = AFDConfig().sizes.layouts(WORLD)


class Rank:
    """A rank whose broadcasts come from a queue that rank 0 fills."""

    def __init__(self, rank: int, queues: list[SimpleQueue[Any]]) -> None:
        self.global_rank = rank
        self._queues = queues

    def broadcast(self, value: Any, source: int) -> Any:
        """As the strategy's."""
        if self.global_rank != source:
            return self._queues[self.global_rank].get(timeout=20)
        for queue in self._queues[1:]:
            queue.put(value)
        return value


class Timer:
    """Known seconds per layout, after scaling those of its row."""

    def __init__(self, seconds: Callable[[Layout], float], scale: Scale) -> None:
        self.asked: list[str] = []
        self._seconds, self._scale = seconds, scale

    def seconds(self, layout: Layout) -> float:
        """Of a step of a few layers, so that a row of the whole model takes what is wanted."""
        self.asked.append(layout.describe())
        return self._seconds(layout) * layout.attention / self._scale(layout)


@pytest.fixture(scope="module")
def job() -> Replicas:
    """Four devices."""
    request = Request(
        model=model(layers=8), cluster=cluster(devices=WORLD), batch=BatchShape.rows(1, 1), parts=1, rungs=RUNGS[:1]
    )
    return Replicas(request=request, rows=4, length=512, layouts=LAYOUTS, micro_batches=(4,))


def search(
    job: Replicas, seconds: Callable[[Layout], float], *, budget: float = 60.0, **planning: Any
) -> tuple[list[Tried], list[list[str]]]:
    """What three ranks find from the plan's layout, and what each of them has timed."""
    start = choose_for_replicas(job, Effort()).candidates[0]
    queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(3)]
    scale, timers = Scale(job, with_few_layers(job, 4), 4), list[Timer]()
    config = AFDConfig(planning=Planning(**planning))

    def run(rank: int) -> Tried:
        timer = Timer(seconds, scale)
        timers.append(timer)
        strategy: Any = Rank(rank, queues)
        trials = Trials(strategy, nn.Identity(), config, time.perf_counter() + budget, lambda *args: timer)
        return trials.run(job, start, lambda what, done: None)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(run, range(3)))
    return found, [timer.asked for timer in timers]


def test_ranks_follow_the_search_to_the_best_layout(job: Replicas) -> None:
    found, asked = search(job, lambda layout: {1: 0.3, 2: 0.2, 3: 0.4}[layout.attention] / layout.depth**2)
    assert {tried.layout for tried in found} == {Layout(attention=1, ffn=1, groups=2)}
    assert asked[0] == asked[1] == asked[2] and len(asked[0]) == len(set(asked[0])) > 1
    assert "2 x (1A + 1F) 0.075 s" in found[2].lines[0]


def test_never_worse_than_the_start(job: Replicas) -> None:
    start = choose_for_replicas(job, Effort()).candidates[0].layout
    found, _ = search(job, lambda layout: 0.1 if layout == start else 0.0999)
    assert {tried.layout for tried in found} == {start}, "less than the tolerance is noise"
    greedy, _ = search(job, lambda layout: 0.1 if layout == start else 0.0999, tolerance=0.0)
    assert start not in {tried.layout for tried in greedy}


@pytest.mark.parametrize("options", [{"trials": 0}, {"trials": 1}, {"budget": -1.0}])
def test_no_trials_without_time_or_wish(job: Replicas, options: dict[str, Any]) -> None:
    found, asked = search(job, lambda layout: 1.0, **options)
    assert {len(tried.lines) for tried in found} == {0} and asked == [[]] * len(asked)


def test_a_model_that_cannot_be_shortened_is_not_tried(job: Replicas) -> None:
    def refuse(layout: Layout) -> float:
        raise PlanError("no")

    start = choose_for_replicas(job, Effort()).candidates[0]
    strategy: Any = Rank(0, [SimpleQueue()])
    timer = SimpleNamespace(seconds=refuse)
    trials = Trials(strategy, nn.Identity(), AFDConfig(), time.perf_counter() + 60, lambda *args: timer)
    assert "no layouts were tried on real steps: no" in trials.run(job, start, lambda what, done: None).lines[0]


def test_the_layout_that_was_measured_is_the_one_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these ranks in a node, even where the simulator likes others better, as in this cluster of two nodes."""
    measured, tried = Layout(attention=1, ffn=1, groups=2, neighbours="groups"), list[Layout]()

    def seconds(layout: Layout) -> float:
        tried.append(layout)
        return 1e-6 if layout == measured else 1.0

    monkeypatch.setattr(decide, "Trials", partial(Trials, timer=lambda *args: SimpleNamespace(seconds=seconds)))
    shape, two_nodes = model(layers=4), cluster(nodes=2, devices=WORLD // 2, nic=5)
    known = Calibration(model=shape, cluster=two_nodes, batch=BatchShape.rows(1, 512), choices=Choices())
    trainer: Any = SimpleNamespace(precision="32-true", global_rank=1, accumulate_grad_batches=1)
    given = Planning(rows=4, tokens=512)
    # Collocated ranks would win here, but cannot divide their optimizer state.
    config = AFDConfig(optimizer_sharding="torch", recompute="none", micro_batches=4, planning=given)
    asked = decide.Asked(strategy=OneRank(), config=config, trainer=trainer, checkpoint=None)  # type: ignore[arg-type]
    decided = decide.Decision(asked, lambda *args, **options: known)._new_plan()
    assert decided.arrangement.layout == measured and decided.plan is not None and decided.plan.best.layout == measured
    job = Replicas(
        request=known.request(1, rungs=RUNGS[:1]), rows=4, length=512, layouts=(measured,), micro_batches=(4,)
    )
    assert tried[0].neighbours == "groups" and choose_for_replicas(job, Effort()).best.layout.neighbours == "roles"


class OneRank:
    """Stands for all ranks of two nodes."""

    global_rank, world_size, num_nodes, root_device = 0, WORLD, 2, torch.device("cpu")
    lightning_module = nn.Identity()

    def broadcast(self, value: Any, source: int) -> Any:
        """To nobody."""
        return value
