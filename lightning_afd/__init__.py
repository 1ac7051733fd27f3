"""Train Mixture-of-Experts transformers with attention and experts on separate workers.

Importing this package makes `Trainer(strategy="afd")` known to Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_afd._registration import register_strategies

if TYPE_CHECKING:
    from lightning_afd.model.hub_import import from_pretrained
    from lightning_afd.report import write_report
    from lightning_afd.strategies.afd import AFDStrategy

__all__ = ["AFDStrategy", "from_pretrained", "write_report"]
__version__ = "0.1.0"

register_strategies()


def __getattr__(name: str) -> Any:
    if name == "AFDStrategy":
        from lightning_afd.strategies.afd import AFDStrategy

        return AFDStrategy
    if name == "from_pretrained":
        from lightning_afd.model.hub_import import from_pretrained

        return from_pretrained
    if name == "write_report":
        from lightning_afd.report import write_report

        return write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
