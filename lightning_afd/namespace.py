"""Lightning comes as two packages with the same code, `lightning.pytorch` and `pytorch_lightning`: one name for both.

The classes below have the names of Lightning's. As `pathlib.Path(...)` makes a PosixPath or a WindowsPath, calling a
class that inherits from one of them makes an instance of a class that has Lightning's own one as a base, too. Nothing
here imports a Trainer package that the user does not use.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch.strategies import ParallelStrategy as _ParallelStrategy
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.utilities.exceptions import MisconfigurationException as _MisconfigurationException
else:
    _Callback = _ParallelStrategy = _SubprocessScriptLauncher = object
    _MisconfigurationException = Exception


@dataclass(frozen=True)
class Namespace:
    """The names under which one of the two packages is imported; `package` holds Trainer and LightningModule."""

    package: str
    fabric_package: str

    def pytorch(self, module: str) -> Any:
        """Its module `module`, as "utilities.model_helpers" of lightning.pytorch or pytorch_lightning."""
        return import_module(f"{self.package}.{module}")

    def fabric(self, module: str) -> Any:
        """Its module `module`, as "utilities.seed" of lightning.fabric or lightning_fabric."""
        return import_module(f"{self.fabric_package}.{module}")

    @property
    def imported(self) -> bool:
        return self.package in sys.modules

    def holds(self, cls: type) -> bool:
        return f"{cls.__module__}.".startswith(f"{self.package}.")


NAMESPACES = (Namespace("lightning.pytorch", "lightning.fabric"), Namespace("pytorch_lightning", "lightning_fabric"))
"""The first one counts where both are imported, or neither."""


def namespace_of(item: object) -> Namespace:
    """The namespace of a Trainer, LightningModule, Callback or Strategy; raises TypeError for anything else."""
    for cls in type(item).__mro__:
        for namespace in NAMESPACES:
            if namespace.holds(cls):
                return namespace
    raise TypeError(f"{type(item).__name__} inherits from no class of {' or '.join(n.package for n in NAMESPACES)}")


def imported_namespace() -> Namespace:
    """That of the Trainer package which is imported."""
    return next((namespace for namespace in NAMESPACES if namespace.imported), NAMESPACES[0])


@cache
def _joined(cls: type, *lightnings: type) -> type:
    """`cls` with Lightning's classes as further bases, under the same name."""
    missing = tuple(base for base in lightnings if not issubclass(cls, base))
    own = {"__doc__": cls.__doc__, "__module__": cls.__module__, "_joined_from": cls}
    return type(cls.__name__, (cls, *missing), own) if missing else cls


class _Either:
    """Base of classes that exist for both packages; `_home` says where Lightning has its class, and its name."""

    _home: ClassVar[tuple[str, str]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        is_made = any(namespace.holds(base) for base in cls.__mro__ for namespace in NAMESPACES)
        return super().__new__(cls if is_made else cls.of(imported_namespace().package))

    @classmethod
    def of(cls, package: str) -> Any:
        """This class for "lightning.pytorch" or for "pytorch_lightning", where a process imports both."""
        namespace = next((known for known in NAMESPACES if known.package == package), None)
        if namespace is None:
            raise ValueError(f"package={package!r}: choose one of {', '.join(n.package for n in NAMESPACES)}")
        module, name = cls._home
        return _joined(cls, getattr(namespace.pytorch(module), name))

    def __reduce__(self) -> Any:
        """No name leads to a joined class: whoever copies or unpickles joins it again."""
        cls = vars(type(self)).get("_joined_from", type(self))
        return _blank, (cls, namespace_of(self).package), vars(self)


def _blank(cls: type[_Either], package: str) -> Any:
    made = cls.of(package)
    return made.__new__(made)


class ParallelStrategy(_Either, _ParallelStrategy):
    """Base of strategies for the Trainer of the package that is imported."""

    _home = ("strategies", "ParallelStrategy")

    def __repr__(self) -> str:
        """Lightning shows it in its error where a strategy was made for the other package's Trainer."""
        name, package = type(self).__name__, namespace_of(self).package
        other = next(known.package for known in NAMESPACES if known.package != package)
        return f"<{name} for {package}; for {other} write {name}.of({other!r})(...)>"


class Callback(_Either, _Callback):
    """Base of callbacks for the Trainer of the package that is imported."""

    _home = ("callbacks", "Callback")


class SubprocessScriptLauncher(_Either, _SubprocessScriptLauncher):
    """Base of launchers that start the other ranks of a host."""

    _home = ("strategies.launchers.subprocess_script", "_SubprocessScriptLauncher")


class MisconfigurationException(_MisconfigurationException):
    """Is caught as Lightning's exception of the same name, in every package that is imported."""

    def __new__(cls, *args: Any) -> Any:
        lightnings = [known.fabric("utilities.exceptions") for known in NAMESPACES if known.imported]
        return super().__new__(_joined(cls, *(module.MisconfigurationException for module in lightnings)), *args)

    def __reduce__(self) -> Any:
        """Another process makes its own one."""
        return MisconfigurationException, self.args
