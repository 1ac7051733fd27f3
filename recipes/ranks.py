"""How many ranks a run needs, from the settings alone."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout, as_groups
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.together import TOGETHER_ORDERS


def ranks_per_node(groups: Any, attention: int, ffn: int, num_nodes: int) -> int:
    """Return the processes that each node starts for so many groups of attention and ffn ranks, rounded up."""
    return -(-Layout(attention=attention, ffn=ffn, groups=as_groups(groups)).world // num_nodes)


OmegaConf.register_new_resolver("ranks_per_node", ranks_per_node, replace=True)


def check_ranks(config: DictConfig) -> None:
    """Raise PlanError if a strategy's numbers, its order, or the ranks that would be started do not fit."""
    strategy = config.strategy
    if not isinstance(strategy, DictConfig):
        return
    is_apart, is_planned = "attention" in strategy, strategy.get("plan", "none") != "none"
    free = ("auto",) if is_planned else ()
    for key in ("attention", "ffn", "micro_batches"):
        value = strategy.get(key, 1)
        if value not in free and (type(value) is not int or value < 1):
            raise PlanError(f"strategy.{key}={value} is not a whole number of at least 1")
    orders = (*sorted(ORDERS if is_apart else TOGETHER_ORDERS), *free)
    if strategy.order not in orders:
        raise PlanError(f"strategy.order={strategy.order} is not a choice; choices: {', '.join(orders)}")
    if is_apart and not is_planned:
        _check_layout(config, strategy)


def _check_layout(config: DictConfig, strategy: DictConfig) -> None:
    try:
        layout = Layout(attention=strategy.attention, ffn=strategy.ffn, groups=as_groups(strategy.groups))
    except PlanError as error:
        raise PlanError(f"strategy.{error}") from None
    if type(config.devices) is not int:
        raise PlanError(f"devices={config.devices} is not a whole number")
    started = config.devices * config.cluster.num_nodes
    if started != layout.world:
        raise PlanError(
            f"devices={config.devices} on cluster.num_nodes={config.cluster.num_nodes} are {started} ranks, but "
            f"{_sum(layout)} are {layout.world}: change attention and ffn, and leave devices to follow"
        )


def _sum(layout: Layout) -> str:
    """The ranks of a layout, spelled out in settings."""
    attention, ffn = f"strategy.attention={layout.attention}", f"strategy.ffn={layout.ffn}"
    if isinstance(layout.groups, int):
        return f"strategy.groups={layout.groups} x ({attention} + {ffn})"
    return f"{layout.attention_groups} x {attention} + {layout.ffn_groups} x {ffn}"
