"""A backward in two parts: the gradients of inputs at once, those of parameters whenever there is time for them.

The graph is cut at operations that lead to an input on one side and to parameters on the other (a matrix product, say).
The first part passes only what leads to inputs and keeps the gradients that arrive at the cuts; the second one starts
there and passes only what leads to parameters. Nothing is computed twice, and the numbers are those of one backward.

torch.distributed.pipelining does the same, privately (stage_backward_input, stage_backward_weight). It is not used, as
it leaves out parameters that no input leads past (a bias beside the hidden states), adds to `grad` behind the back of
hooks on parameters, runs hooks on activations twice with their effect, runs operations twice that compute everything
at once (compiled parts), and fails where one parameter is used on both sides of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_afd.model.backward import Ends


class Indivisible(Exception):
    """Why a backward can only be run as a whole; raised before anything is computed."""


@dataclass(eq=False)
class _Group:
    """Cuts that lead to parameters in common, and the gradients that have arrived at them."""

    cuts: set[Node]
    parameters: set[Tensor]
    arrived: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)

    def keep(self, cut: Node) -> torch.utils.hooks.RemovableHandle:
        """Note the gradients of a cut's outputs as they pass."""
        return cut.register_prehook(lambda grads: self.arrived.__setitem__(cut, grads))  # type: ignore[no-any-return]

    def run(self) -> None:
        edges = [(cut, i, grad) for cut, grads in self.arrived.items() for i, grad in enumerate(grads)]
        starts = [(GradientEdge(cut, i), grad) for cut, i, grad in edges if grad is not None]
        if not starts:
            return
        # Hooks on activations have acted on what arrived; they shall not do so again.
        handles = [cut.register_prehook(lambda _, kept=grads: kept) for cut, grads in self.arrived.items()]
        try:
            outs, grads = zip(*starts, strict=True)
            torch.autograd.backward(outs, grads, inputs=list(self.parameters))
        finally:
            for handle in handles:
                handle.remove()


class WeightGradients:
    """The second part of a backward."""

    def __init__(self, groups: list[_Group], beside: Ends, parameters: Iterable[Tensor]) -> None:
        self._groups = groups
        self._beside = beside
        self._parameters = list(parameters)

    def run(self) -> None:
        """Add to the gradients of the parameters; to be called once."""
        while self._groups:
            self._groups.pop().run()
        if self._parameters:
            outs, grads = zip(*self._beside, strict=True)
            torch.autograd.backward(outs, grads, inputs=self._parameters)
        self._beside, self._parameters = (), []


def input_gradients(pairs: Ends) -> WeightGradients:
    """Add the gradients of all leaves that are no parameters; returns what is left to do.

    Raises Indivisible where that would be wrong or no gain.
    """
    graph = _Graph([_node_of(out) for out, _ in pairs])
    groups = graph.groups()
    towards = [(out, grad) for out, grad in pairs if _node_of(out) in graph.towards_inputs]
    beside = [(out, grad) for out, grad in pairs if _node_of(out) not in graph.towards_inputs]
    parameters = set().union(*(graph.parameters_of(_node_of(out)) for out, _ in beside))
    if any(not parameters.isdisjoint(group.parameters) for group in groups):
        raise Indivisible("uses a parameter both beside and behind its input")
    handles = [group.keep(cut) for group in groups for cut in group.cuts]
    try:
        if towards:
            outs, grads = zip(*towards, strict=True)
            torch.autograd.backward(outs, grads, retain_graph=True, inputs=list(graph.inputs))
    finally:
        for handle in handles:
            handle.remove()
    return WeightGradients(groups, beside, parameters)


@contextmanager
def modules_called() -> Iterator[list[nn.Module]]:
    """Collects the modules that are called inside: in a backward only activation checkpointing does that."""
    called: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, args: called.append(module))
    try:
        yield called
    finally:
        handle.remove()


class _Graph:
    """What leads to some outputs, divided into what leads on to inputs and what to parameters only."""

    def __init__(self, ends: Sequence[Node]) -> None:
        self.inputs: set[Tensor] = set()
        self.towards_inputs: set[Node] = set()
        self._order: list[Node] = []
        self._below: dict[Node, frozenset[Tensor]] = {}
        for node in _downwards(ends):
            leaf = getattr(node, "variable", None)
            if leaf is None:
                self._add(node)
            elif isinstance(leaf, nn.Parameter):
                self._below[node] = frozenset((leaf,))
            else:
                self.inputs.add(leaf)
                self.towards_inputs.add(node)

    def _add(self, node: Node) -> None:
        before = _before(node)
        if any(other in self.towards_inputs for other in before):
            self.towards_inputs.add(node)
            self._order.append(node)
        else:
            self._below[node] = frozenset().union(*(self._below[other] for other in before))

    def parameters_of(self, node: Node) -> frozenset[Tensor]:
        """Parameters that a node leads to, beside inputs."""
        if node in self._below:
            return self._below[node]
        return frozenset().union(*(self._below.get(other, frozenset()) for other in _before(node)))

    def groups(self) -> list[_Group]:
        """The cuts, those with common parameters together."""
        groups: list[_Group] = []
        for node in self._order:
            if _is_compiled(node):
                raise Indivisible("has a compiled part, which computes all gradients at once")
            parameters = set(self.parameters_of(node))
            if not parameters:
                continue
            if isinstance(node, BackwardCFunction):
                raise Indivisible(f"has an operation of its own ({type(node).__name__}) that uses parameters")
            mine = _Group({node}, parameters)
            for other in [group for group in groups if not group.parameters.isdisjoint(parameters)]:
                groups.remove(other)
                mine = _Group(mine.cuts | other.cuts, mine.parameters | other.parameters)
            groups.append(mine)
        for group in groups:
            self._refuse_chain(group)
        return groups

    def _refuse_chain(self, group: _Group) -> None:
        """The second part would pass again what lies between two uses of a parameter."""
        if len(group.cuts) > 1:
            starts = [other for cut in group.cuts for other in _before(cut) if other in self.towards_inputs]
            if any(node in group.cuts for node in _downwards(starts)):
                raise Indivisible("uses a parameter twice, one use behind the other")


def _downwards(starts: Iterable[Node]) -> Iterator[Node]:
    """All nodes from these on, each behind those that it leads to."""
    seen: set[Node] = set()
    waiting = [(node, False) for node in starts]
    while waiting:
        node, complete = waiting.pop()
        if complete:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(other, False) for other in _before(node) if other not in seen]


def _before(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _node_of(out: Tensor) -> Node:
    """The operation that made a tensor, or that collects the gradient of a leaf."""
    if out.grad_fn is not None:
        return out.grad_fn
    node = out.view_as(out).grad_fn
    assert node is not None
    return _before(node)[0]


def _is_compiled(node: Node) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"
