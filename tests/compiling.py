"""The ways in which a script compiles a part of its model; the backend "eager" traces and runs without a compiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Compile = Callable[[nn.Module, str], None]


def wrapped(root: nn.Module, name: str) -> None:
    """In its place comes `torch.compile(module)`, another module around it."""
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, torch.compile(root.get_submodule(name), backend="eager"))


def in_place(root: nn.Module, name: str) -> None:
    """`module.compile()`."""
    root.get_submodule(name).compile(backend="eager")


def by_forward(root: nn.Module, name: str) -> None:
    """A compiled forward on the instance."""
    module = root.get_submodule(name)
    module.forward = torch.compile(module.forward, backend="eager")


def by_class(root: nn.Module, name: str) -> None:
    """A forward that was decorated in its class."""
    module = root.get_submodule(name)
    forward = torch.compile(type(module).forward, backend="eager")
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def graphs() -> int:
    """Graphs that were really compiled since the counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
