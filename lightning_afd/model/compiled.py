"""What torch.compile may wrap: parts beside the experts run as one graph, what a step is suspended in cannot.

A module counts as compiled by `torch.compile(module)`, by `module.compile()`, or by a compiled `forward`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_afd.errors import PlanError
from lightning_afd.model.experts_module import is_experts


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run a compiled graph."""
    in_place = module._compiled_call_impl is not None
    return in_place or "_orig_mod" in module._modules or is_compiled_function(module.forward)


def is_compiled_function(function: Any) -> bool:
    """Whether a function comes from torch.compile; a wrapper module's own forward does, too."""
    return hasattr(function, "_torchdynamo_orig_callable")


def plain_name(name: str) -> str:
    """The name of a module or a parameter without the wrappers of `torch.compile(module)` on the way to it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def refuse_compiled(root: nn.Module) -> None:
    """Raise PlanError where the experts, or anything that contains experts, is compiled."""
    for name, module in root.named_modules():
        if is_compiled(module) and any(is_experts(part) for part in module.modules()):
            raise PlanError(
                f"{name or type(root).__name__} is compiled with torch.compile and contains routed experts, which run "
                "on other ranks: compile what lies beside them instead, such as self_attn, shared experts or the head"
            )


def refuse_compiled_routers(layer_name: str, layer: nn.Module, experts: nn.Module, num_experts: int) -> None:
    """Raise PlanError where a layer's router is compiled: its logits must be seen while the step runs."""
    for name in _beside(layer, experts):
        module = layer.get_submodule(name)
        if is_compiled(module) and _is_router(module, num_experts):
            raise PlanError(
                f"{layer_name}.{name} is compiled with torch.compile and is a router, whose logits are needed outside "
                "of a graph: compile what lies beside it instead, such as self_attn, shared experts or the head"
            )


def inside_compiled(root: nn.Module) -> set[nn.Module]:
    """Modules that run in a graph, so that hooks on them would be part of it."""
    return {part for module in root.modules() if is_compiled(module) for part in module.modules()}


def _beside(layer: nn.Module, experts: nn.Module) -> list[str]:
    """What the layer and the modules around its experts hold themselves: a router is no part of an attention."""
    around = [(name, module) for name, module in layer.named_modules() if experts in module.modules()]
    held = [f"{name}.{child}".lstrip(".") for name, module in around for child, _ in module.named_children()]
    return [name for name in held if name not in dict(around)]


def _is_router(module: nn.Module, num_experts: int) -> bool:
    """It has one matrix: [E experts, H hidden]; a bias may be stored as a row."""
    rows = [parameter.shape[0] for parameter in module.parameters() if parameter.dim() == 2]
    return [count for count in rows if count > 1] == [num_experts]
