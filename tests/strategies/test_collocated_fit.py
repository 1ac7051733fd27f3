"""Strategies whose ranks have attention and experts, by name and by fallback, with what users look at."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from cases import join, weights
from fits import QUIET, State, tiny_module, worst
from lightning.pytorch.plugins.environments import LightningEnvironment
from pool import RankPool

from lightning_afd import AFDStrategy, EPStrategy, FlowMoEStrategy
from lightning_afd.callbacks import ExpertLoad, StepMonitor
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import Layout
from lightning_afd.strategies import afd
from lightning_afd.strategies.config import AFDConfig, Arrangement
from lightning_afd.timeline import Timeline


@dataclass
class Result:
    """What a rank has in the end."""

    weights: State
    metrics: dict[str, float]
    said: list[str] = field(default_factory=list)
    timeline: Timeline | None = None


def fit(world: int, strategy: Any, options: dict[str, Any]) -> Result:
    """Two clipped steps and a validation; `strategy` is a name, or a class to be made with `options`."""
    strategy = strategy if isinstance(strategy, str) else strategy(**options)
    module, said = tiny_module(steps=2, val_steps=1, layers=2), list[str]()
    trainer = pl.Trainer(
        **{**QUIET, "limit_val_batches": 1.0},
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=[LightningEnvironment()],
        callbacks=[ExpertLoad(every_n_steps=1), StepMonitor()],
        gradient_clip_val=0.1,
    )
    with patch.object(afd, "rank_zero_info", said.append):
        trainer.fit(module)
    result = Result(weights(module), {name: float(value) for name, value in trainer.callback_metrics.items()}, said)
    if hasattr(trainer.strategy, "gather_timeline"):
        result.timeline = trainer.strategy.gather_timeline()
    return result


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Result:
    """One device."""
    result: Result = pool.run(fit, 1, 1, "auto", {})[0]
    return result


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (1, "afd", {}),
        (2, "ep", {}),
        (2, "flowmoe", {}),
        (2, EPStrategy, {"order": "experts-only", "micro_batches": 3, "dedup": False, "recompute": "full"}),
        (3, FlowMoEStrategy, {"recompute_experts": True, "capacity": "full"}),
    ],
)
def test_by_name_or_with_options(
    pool: RankPool, alone: Result, world: int, strategy: Any, options: dict[str, Any]
) -> None:
    ranks = pool.run(fit, world, world, strategy, options)
    for rank in ranks:
        assert rank.metrics["val_loss"] == pytest.approx(alone.metrics["val_loss"], rel=1e-5)
        assert rank.metrics["moe/layer1/max_over_mean"] == ranks[0].metrics["moe/layer1/max_over_mean"] >= 1
        assert rank.metrics["exposed"] < 1
        reason = "1 rank cannot keep attention and experts apart, 2 or more can"
        assert rank.said == ([f"strategy afd trains collocated (order flowmoe): {reason}"] if world == 1 else [])
    assert worst(join([rank.weights for rank in ranks]), alone.weights)[0] <= 1e-5
    timeline = ranks[0].timeline
    waits = {f"{span.worker}:{span.action.op}" for span in timeline.spans if timeline.waits(span)}
    assert waits == {"F0:D", "A0:C"} and all(0 < timeline.exposed(rank) < 1 for rank in range(world))


def test_the_fallback_is_a_choice() -> None:
    apart = Arrangement(layout=Layout(attention=1, ffn=1), order="af-pipe", micro_batches=4)
    assert AFDConfig().arrange(2) == apart
    together = AFDConfig(order="layer-major").arrange(1)
    assert (together.layout, together.order) == (Layout.together(1), "flowmoe")
    assert AFDConfig().collocated(4, "slow links").layout == Layout.together(4)
    for config in (AFDConfig(fallback="error"), AFDConfig(attention=1)):
        with pytest.raises(MisconfigurationException, match="at least 2 ranks"):
            config.arrange(1)
    with pytest.raises(
        MisconfigurationException, match=r"falls back \(slow links\), but .* optimizer_sharding='torch'"
    ):
        AFDConfig(optimizer_sharding="torch").collocated(4, "slow links")
    with pytest.raises(MisconfigurationException, match="fallback='none': choose 'collocated' or 'error'"):
        AFDStrategy(fallback="none")


def test_ranks_with_both_roles_have_nothing_to_spread_in_nodes() -> None:
    assert AFDConfig().can_collocate and not AFDConfig(dedup="node").can_collocate
    for strategy in (EPStrategy, FlowMoEStrategy):
        with pytest.raises(
            MisconfigurationException, match="dedup='node' on ranks that all have attention and experts"
        ):
            strategy(dedup="node")
