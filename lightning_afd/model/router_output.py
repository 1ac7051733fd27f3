"""What routers return, for the ranks that do not run them: a loss may use the router logits of all layers.

Shapes: T tokens, E experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class RouterOutput:
    """The pattern for stand-ins of routers on other ranks."""

    kinds: frozenset[str]
    """Names of the classes of routers that have been seen."""
    output: tuple[Any, ...]
    """What the last one of them returned, logits [T, E] first."""

    def text(self) -> str:
        """Kinds, shapes and dtypes, without values."""
        parts = [
            [list(part.shape), str(part.dtype).removeprefix("torch.")] if isinstance(part, Tensor) else None
            for part in self.output
        ]
        return json.dumps({"kinds": sorted(self.kinds), "output": parts})

    @classmethod
    def parse(cls, text: str, device: torch.device) -> RouterOutput:
        """Read `text()` back, with zeros for all values."""
        said = json.loads(text)
        output = tuple(
            None if part is None else torch.zeros(part[0], dtype=getattr(torch, part[1]), device=device)
            for part in said["output"]
        )
        return cls(frozenset(said["kinds"]), output)


def kind_of(module: nn.Module) -> str:
    """The name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
