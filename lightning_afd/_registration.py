"""Make the strategies known to Lightning by name without importing it: planning needs neither it nor torch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lightning_afd.namespace import NAMESPACES

_DESCRIPTIONS = {
    "afd": "attention-FFN disaggregation for Mixture-of-Experts models",
    "ep": "expert and data parallelism on the same ranks for Mixture-of-Experts models",
    "flowmoe": "the same as ep, pipelined over micro-batches",
}


def register_strategies() -> None:
    """Register in each Trainer package: now if its strategies are imported, else as soon as they are."""
    for namespace in NAMESPACES:
        watcher = _RegistryWatcher(namespace.package)
        if watcher.module in sys.modules:
            _register(sys.modules[watcher.module], namespace.package)
        elif watcher not in sys.meta_path:
            sys.meta_path.insert(0, watcher)


def _register(module: ModuleType, package: str) -> None:
    registry = module.StrategyRegistry
    for name, description in _DESCRIPTIONS.items():
        if name not in registry.available_strategies():
            registry.register(name, _make, description=description, package=package, kind=name)


def _make(package: str, kind: str, **options: Any) -> Any:
    from lightning_afd.strategies.afd import AFDStrategy
    from lightning_afd.strategies.ep import EPStrategy
    from lightning_afd.strategies.flowmoe import FlowMoEStrategy

    strategies = (AFDStrategy, EPStrategy, FlowMoEStrategy)
    made = next(strategy for strategy in strategies if strategy.strategy_name == kind)
    return made.of(package)(**options)


@dataclass(frozen=True)
class _RegistryWatcher(importlib.abc.MetaPathFinder):
    """Waits for the import of one package's strategies, registers behind it, and is gone."""

    package: str

    @property
    def module(self) -> str:
        """Where the package has its registry."""
        return f"{self.package}.strategies"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, self.package)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, package: str) -> None:
        self._loader = loader
        self._package = package

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module, self._package)
