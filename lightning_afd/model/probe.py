"""What a decoder layer and its router return: the questions that decide how the layer is cut.

Shapes: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_afd.errors import PlanError
from lightning_afd.model.coroutine import Segment
from lightning_afd.model.graph import leaves_of
from lightning_afd.model.split import DecoderLayer


def is_routing(output: Any, num_experts: int) -> bool:
    """Whether a module's output is a router's: a tuple of logits [.., E] first and chosen experts (integers) behind."""
    if not isinstance(output, tuple) or not isinstance(output[0], Tensor):
        return False
    logits = output[0]
    chosen = any(isinstance(o, Tensor) and not o.is_floating_point() for o in output[1:])
    return chosen and logits.is_floating_point() and logits.dim() >= 2 and logits.shape[-1] == num_experts


def hidden_of(out: Any) -> Tensor:
    """The hidden states in what a decoder layer returned."""
    hidden = out[0] if isinstance(out, tuple) else out
    assert isinstance(hidden, Tensor)
    return hidden


def direction_of(tensor: Tensor) -> Tensor:
    """One fixed direction for derivatives of a tensor of this many elements."""
    return torch.arange(tensor.numel(), device=tensor.device).cos().reshape(tensor.shape).to(tensor.dtype)


def distance_from_identity(base: Tensor, returned_TH: Tensor, factor_T1: Tensor | None = None) -> float:
    """How far d base / d returned is from the identity, or from one factor per token, along one fixed direction.

    Infinite where the derivative depends on something trainable, such as a scale that is 1 at the start, of which the
    factor does not depend.
    """
    v = direction_of(base)
    if not base.requires_grad:
        return 1.0
    got = torch.autograd.grad(base, returned_TH, v, create_graph=True, allow_unused=True)[0]
    if got is None:
        return 1.0
    factors = [] if factor_T1 is None else [factor_T1]
    if got.numel() != v.numel() or leaves_of([got]) - leaves_of(factors):
        return float("inf")
    want_TH = v.reshape(-1, v.shape[-1])
    want_TH = want_TH if factor_T1 is None else want_TH * factor_T1.detach()
    return (got.detach().reshape(-1).float() - want_TH.reshape(-1).float()).abs().max().item() if v.numel() else 0.0


def other_uses(out: Any, returned_TH: Tensor) -> float:
    """Infinite where the layer returns something beside the hidden states that depends on the experts, else 0."""
    others = [o for o in tree_leaves(out[1:]) if isinstance(o, Tensor)] if isinstance(out, tuple) else []
    sums = [o.sum() for o in others if o.requires_grad]
    found = sums and torch.autograd.grad(sums, returned_TH, retain_graph=True, allow_unused=True)[0] is not None
    return float("inf") if found else 0.0


def uses_logits(base: Tensor, segment: Segment) -> bool:
    """Whether the layer computes something from the leaf of the logits: a hook behind ours made weights again."""
    outs = [t.sum() for t in (base, segment.x_TH, segment.w_TK) if t is not None and t.requires_grad]
    leaves = [leaf for _, leaf in segment.logits]
    if not outs or not leaves:
        return False
    return any(g is not None for g in torch.autograd.grad(outs, leaves, retain_graph=True, allow_unused=True))


def normal(tensor: Tensor) -> Tensor:
    """A tensor that autograd can save, also where `tensor` was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def detached(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(o.detach() if isinstance(o, Tensor) else o for o in out)
    return out.detach()


def more_than_hidden(name: str) -> str:
    """Why a layer cannot live in another group than its neighbours."""
    return (
        f"{name} returns more than its hidden states, for the layers behind it: such a model needs groups=1 or (1, f), "
        "and head='attention'"
    )


def check_returns(layer: DecoderLayer) -> None:
    """Refuse a layer whose code returns a tuple: other groups' layers return what they were given, one tensor."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(layer.layer).forward))))
    except (OSError, TypeError, SyntaxError):  # no source: found out in the first call
        return
    if any(isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) for node in ast.walk(code)):
        raise PlanError(more_than_hidden(layer.name))
