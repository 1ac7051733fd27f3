"""Hand the rest of the model a leaf in place of a router's logits: an auxiliary loss stays in the tail's graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_afd.model.coroutine import Coroutine, Host
from lightning_afd.model.probe import is_routing
from lightning_afd.model.router_output import RouterOutput, kind_of
from lightning_afd.model.split import MoELayer


class LogitsLeaf:
    """The hook on the modules beside the experts of one layer."""

    def __init__(self, host: Host, layer: MoELayer) -> None:
        self._host = host
        self._layer = layer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        coroutine = self._host.active
        if coroutine is None or self._host.in_backward or not is_routing(output, self._layer.num_experts):
            return output
        own = coroutine.segment.layer == self._layer.index
        if own:
            self._remember(coroutine, module, output)
        logits = output[0]
        if not logits.requires_grad:
            return output
        leaf = logits.detach().requires_grad_()
        if own:
            coroutine.segment.logits.append((logits, leaf))
        return (leaf, *output[1:])

    @staticmethod
    def _remember(coroutine: Coroutine, module: nn.Module, output: tuple[Any, ...]) -> None:
        output = tree_map_only(Tensor, Tensor.detach, tuple(output))
        seen = frozenset[str]() if coroutine.routing is None else coroutine.routing.kinds
        coroutine.routing = RouterOutput(seen | {kind_of(module)}, output)
        if coroutine.segment.routed is None:
            coroutine.segment.routed = output[0]
