"""Tokens per expert: exact, over all ranks, training only; what the callback makes of them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_job import Batches, LocalJob, plain_step
from tiny import TinyMoE, tiny, tiny_hf
from torch import Tensor, nn

from lightning_afd.attention_rank import AttentionRank
from lightning_afd.callbacks import ExpertLoad
from lightning_afd.expert_load import ExpertCounts, load_figures
from lightning_afd.model.split import find_moe_layers
from lightning_afd.placement import Layout
from lightning_afd.recipes.local_job import step_of
from lightning_afd.strategies.expert_balance import ExpertBalance


def batches(replicas: int, seed: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(0, 32, shape, generator=generator) for shape in [(2, 5), (1, 4)]] for _ in range(replicas)]


def plain_counts(model: TinyMoE, data: Batches) -> list[list[int]]:
    """What hooks on the routers of a plain loop see."""
    routers = [layer.mlp.router for layer in model.layers]
    counts = [torch.zeros(4, dtype=torch.int64) for _ in routers]

    def hook(counts_E: Tensor, router: nn.Module, args: Any, out: Any) -> None:
        counts_E += out[2].flatten().bincount(minlength=4)

    for router, counts_E in zip(routers, counts, strict=True):
        router.register_forward_hook(partial(hook, counts_E))
    for ids in (ids for replica in data for ids in replica):
        model(ids)
    return [counts_E.tolist() for counts_E in counts]


def summed(job: LocalJob) -> list[list[list[int]]]:
    """The counts of the window, on every rank."""

    def of_rank(rank: int) -> list[list[int]]:
        counts, collectives = job.engines[rank].expert_counts, job.engines[rank].collectives
        counts.end_window()
        return [counts_E.tolist() for counts_E in counts.by_layer(counts.start_sum(collectives).wait())]

    return job.network.run([lambda rank=rank: of_rank(rank) for rank in range(job.layout.world)])  # type: ignore[misc]


@pytest.mark.parametrize(("groups", "recompute"), [(1, "full"), (2, "none"), (2, "full")])
def test_counts_of_a_window_are_those_of_plain_routers(groups: int, recompute: str) -> None:
    model = tiny(layers=4).double()
    layout = Layout(attention=2, ffn=2, groups=groups)
    job = LocalJob(model, layout, recompute=recompute)
    job.step(batches(2, 0))
    assert summed(job)[0] == [[0] * 4] * 4  # nobody asked
    for engine in job.engines:
        engine.expert_counts.enabled = True
    ids = batches(2, 9)[0][0]
    for window in range(2):
        data = [batches(2, 2 * window + batch) for batch in (1, 2)]
        for batch in data:
            job.step(batch)
        work = [[step_of(lambda rank=rank: job.models[rank](ids))] for rank in range(groups * 2)]  # type: ignore[misc]
        with torch.no_grad():
            job.run(work, training=False)
        want = plain_counts(tiny(layers=4).double(), [replica for batch in data for replica in batch])
        assert summed(job) == [want] * layout.world
        assert sum(want[0]) == 2 * 2 * 14 * 2  # batches, replicas, tokens, experts per token


def test_counting_in_a_recompute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each dispatch counted twice."""
    begin = AttentionRank._begin_routing

    def twice(rank: AttentionRank, layer: int, segment: Any) -> Any:
        begin(rank, layer, segment)
        return begin(rank, layer, segment)

    monkeypatch.setattr(AttentionRank, "_begin_routing", twice)
    model, data = tiny().double(), batches(1, 0)
    job = LocalJob(model, Layout(attention=1, ffn=1))
    for engine in job.engines:
        engine.expert_counts.enabled = True
    outcome = job.step(data)
    assert outcome.difference(*plain_step(model, data)) < 1e-12
    assert summed(job)[0] != plain_counts(model, data)


def test_layers_may_have_different_numbers_of_experts() -> None:
    counts = ExpertCounts((2, 4), torch.device("cpu"))
    counts.enabled = True
    counts.add(0, torch.tensor([[0], [1], [1]], dtype=torch.int32))
    counts.add(1, torch.tensor([[0, 3], [1, 3]]))
    first, second = counts.by_layer(counts.start_sum(Alone()).wait())
    assert (first.tolist(), second.tolist()) == ([1, 2], [1, 1, 0, 2])
    assert load_figures(second) == {"max_over_mean": 2.0, "dead_experts": 1.0}


class Alone:
    """The collectives of a job with one rank."""

    def __init__(self) -> None:
        self.sums = 0

    def start_sum(self, tensor: Tensor) -> Any:
        self.sums += 1
        return SimpleNamespace(wait=lambda: tensor)


class Scaler:
    """A loss scaler whose steps all overflow."""

    scale = 8.0

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return self.scale

    def leave_out(self) -> None:
        self.scale /= 2


def balance_of(rate: float) -> tuple[ExpertBalance, Any, list[Tensor]]:
    layers = find_moe_layers(tiny_hf("deepseek_v3", num_hidden_layers=3))
    counts = ExpertCounts((4, 4), torch.device("cpu"))
    engine: Any = SimpleNamespace(
        plan=SimpleNamespace(expert_bias_rate=rate), expert_counts=counts, collectives=Alone()
    )
    balance = ExpertBalance(engine, layers)
    balance.count()
    counts.add(1, torch.tensor([[0], [0], [1]]))
    balance.end_window()
    return balance, engine, [layer.layer.mlp.gate.e_score_correction_bias for layer in layers]


def test_a_step_that_a_loss_scaler_leaves_out_moves_nothing() -> None:
    balance, _, biases = balance_of(0.5)
    scaler, norm = Scaler(), SimpleNamespace(skipped=False)
    precision = SimpleNamespace(scaler=scaler)
    balance.around(scaler.leave_out, precision, norm)  # type: ignore[arg-type]
    assert not any(bias.any() for bias in biases)
    assert balance.around(lambda: "made", precision, norm) == "made"  # type: ignore[arg-type]
    assert [bias.tolist() for bias in biases] == [[0.0] * 4, [-0.5, -0.5, 0.5, 0.5]]


def test_one_exchange_serves_biases_and_figures() -> None:
    balance, engine, _ = balance_of(0.5)
    balance.around(lambda: None, None, SimpleNamespace(skipped=False))  # type: ignore[arg-type]
    assert balance.loads()[1].tolist() == [2, 1, 0, 0]
    assert engine.collectives.sums == 1
    balance, engine, _ = balance_of(0.0)
    balance.around(lambda: None, None, SimpleNamespace(skipped=False))  # type: ignore[arg-type]
    assert engine.collectives.sums == 0
    assert balance.loads()[1].tolist() == [2, 1, 0, 0]


class Logger:
    """Keeps what it is given; its experiment knows histograms."""

    def __init__(self) -> None:
        self.figures: dict[int, dict[str, float]] = {}
        self.histograms: list[tuple[str, int]] = []
        self.experiment = SimpleNamespace(add_histogram=lambda name, _, step: self.histograms.append((name, step)))

    def log_metrics(self, figures: dict[str, float], step: int) -> None:
        self.figures[step] = figures


def test_the_callback_logs_every_n_optimizer_steps() -> None:
    asked = []
    balance = SimpleNamespace(
        count=lambda: asked.append("count"), loads=lambda: asked.append("loads") or (torch.tensor([3, 0, 0, 1]),)
    )
    plain = SimpleNamespace(log_metrics=lambda figures, step: None)
    logger, callback = Logger(), ExpertLoad(every_n_steps=2)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(balance=balance), global_step=0, callback_metrics={}, loggers=[plain, logger]
    )
    callback.on_train_start(trainer, None)  # type: ignore[arg-type]
    for batch in range(1, 11):
        trainer.global_step = batch // 2  # two batches per optimizer step
        callback.on_train_batch_end(trainer, None)  # type: ignore[arg-type]
    figures = {"moe/layer0/max_over_mean": 3.0, "moe/layer0/dead_experts": 2.0}
    assert logger.figures == {2: figures, 4: figures}
    assert logger.histograms == [("moe/layer0/tokens", 2), ("moe/layer0/tokens", 4)]
    assert asked == ["count", "loads", "loads"]
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == figures


def test_the_callback_does_nothing_under_other_strategies() -> None:
    callback = ExpertLoad(every_n_steps=1)
    trainer: Any = SimpleNamespace(strategy=object(), global_step=0)
    callback.on_train_start(trainer, None)  # type: ignore[arg-type]
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, None)  # type: ignore[arg-type]
    assert callback.loads == ()
    with pytest.raises(ValueError, match="every_n_steps=0"):
        ExpertLoad(every_n_steps=0)
