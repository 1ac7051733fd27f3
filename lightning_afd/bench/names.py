"""Names of our own contenders: `afd`, `afd/zero-bubble:8`, `ep+nodedup`, `flowmoe:2`; every name parses back."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lightning_afd.errors import PlanError
from lightning_afd.placement import Layout
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.together import TOGETHER_ORDERS

BEST = "best"
"""The order of `afd` that is the fastest one in a short trial."""
NODEDUP = "nodedup"
_DEFAULT_ORDERS = {"afd": BEST, "ep": "sequential", "experts-only": "experts-only", "flowmoe": "flowmoe"}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an own contender does; `str` gives its name."""

    strategy: str
    """afd, or ep, experts-only and flowmoe, whose ranks have attention and experts."""
    order: str
    micro_batches: int | None = None
    """None: as many as the job says (1 where nothing overlaps)."""
    dedup: bool = True
    """Whether a token is sent once to each rank that it visits, or once per expert."""

    def __str__(self) -> str:
        order = "" if self.order == _DEFAULT_ORDERS[self.strategy] else f"/{self.order}"
        count = "" if self.micro_batches is None else f":{self.micro_batches}"
        return f"{self.strategy}{order}{count}{'' if self.dedup else f'+{NODEDUP}'}"

    @property
    def apart(self) -> bool:
        """Whether attention and experts are on separate ranks."""
        return self.strategy == "afd"

    def layout(self, attention: int, ffn: int) -> Layout:
        """Of a job with so many A and F ranks: these, or as many collocated ones."""
        return Layout(attention=attention, ffn=ffn) if self.apart else Layout.together(attention + ffn)

    def counted(self, micro_batches: int) -> Spec:
        """The same with a number of micro-batches: this one where the name leaves it open."""
        open_count = 1 if self.strategy == "ep" else micro_batches
        return replace(self, micro_batches=self.micro_batches or open_count)


def parse(name: str) -> Spec | None:
    """The contender of our own that a name means, None for another's; raises PlanError for one that cannot be."""
    match = re.fullmatch(r"([a-z-]+)(?:/([a-z-]+))?(?::(\d+))?(\+nodedup)?", name)
    if match is None or match[1] not in _DEFAULT_ORDERS:
        return None
    strategy, order, count, nodedup = match.groups()
    known = (BEST, *ORDERS) if strategy == "afd" else tuple(TOGETHER_ORDERS)
    if order is not None and order not in known:
        raise PlanError(f"contender {name}: order {order} is not a choice; choices: {', '.join(known)}")
    if count is not None and int(count) < 1:
        raise PlanError(f"contender {name}: {count} micro-batches; at least 1 is needed")
    return Spec(
        strategy=strategy,
        order=order or _DEFAULT_ORDERS[strategy],
        micro_batches=None if count is None else int(count),
        dedup=nodedup is None,
    )
