"""`Trainer(strategy="ep")`: attention and experts on the same ranks, without overlap; the plain baseline."""

from __future__ import annotations

from lightning_afd.strategies.afd import AFDStrategy
from lightning_afd.strategies.config import EPConfig


class EPStrategy(AFDStrategy):
    """Train a Mixture-of-Experts model with expert and data parallelism on the same ranks.

    Each rank has a replica of everything dense and its share of the experts. By default every dispatch and combine of a
    whole batch is waited for; `order="experts-only"` hides them behind chunks of the experts' work. Options are those
    of `EPConfig`: micro_batches, order, dedup and so on; for the rest see AFDStrategy.
    """

    strategy_name = "ep"
    config_type = EPConfig
