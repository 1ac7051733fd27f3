"""`Trainer(strategy="flowmoe")`: attention and experts on the same ranks, pipelined over micro-batches."""

from __future__ import annotations

from lightning_afd.strategies.config import FlowMoEConfig
from lightning_afd.strategies.ep import EPStrategy


class FlowMoEStrategy(EPStrategy):
    """Train a Mixture-of-Experts model as FlowMoE does: while one micro-batch travels to experts or back, attention,
    routers and experts of others are computed.

    Options are those of `FlowMoEConfig`, the same as of EPStrategy with other defaults.
    """

    strategy_name = "flowmoe"
    config_type = FlowMoEConfig
