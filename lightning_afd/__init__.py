"""Train Mixture-of-Experts transformers with attention and experts on separate workers.

Importing this package makes `Trainer(strategy="afd")` known to Lightning, and "ep" and "flowmoe", which train the same
with attention and experts on the same workers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_afd._registration import register_strategies

if TYPE_CHECKING:
    from lightning_afd.model.hub_import import from_pretrained
    from lightning_afd.report import write_report
    from lightning_afd.strategies.afd import AFDStrategy
    from lightning_afd.strategies.ep import EPStrategy
    from lightning_afd.strategies.flowmoe import FlowMoEStrategy
    from lightning_afd.strategies.planning.options import Planning

__all__ = ["AFDStrategy", "EPStrategy", "FlowMoEStrategy", "Planning", "from_pretrained", "write_report"]
__version__ = "0.1.0"

register_strategies()


_PLACES = {
    "AFDStrategy": "lightning_afd.strategies.afd",
    "EPStrategy": "lightning_afd.strategies.ep",
    "FlowMoEStrategy": "lightning_afd.strategies.flowmoe",
    "Planning": "lightning_afd.strategies.planning.options",
    "from_pretrained": "lightning_afd.model.hub_import",
    "write_report": "lightning_afd.report",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
