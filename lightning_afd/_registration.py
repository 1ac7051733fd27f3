"""Make `Trainer(strategy="afd")` known to Lightning without importing it: planning needs neither it nor torch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

REGISTRY_MODULE = "lightning.pytorch.strategies"


def register_strategies() -> None:
    """Register now if Lightning's strategies are imported, else as soon as they are."""
    if REGISTRY_MODULE in sys.modules:
        _register(sys.modules[REGISTRY_MODULE])
    elif not any(isinstance(finder, _RegistryWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryWatcher())


def _register(module: ModuleType) -> None:
    registry = module.StrategyRegistry
    if "afd" not in registry.available_strategies():
        registry.register("afd", _make_afd, description="attention-FFN disaggregation for Mixture-of-Experts models")


def _make_afd(**options: Any) -> Any:
    from lightning_afd.strategies.afd import AFDStrategy

    return AFDStrategy(**options)


class _RegistryWatcher(importlib.abc.MetaPathFinder):
    """Waits for the import of Lightning's strategies, registers behind it, and is gone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)
