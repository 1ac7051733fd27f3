"""Conditions of a network as text: `500mbit`, `unshaped`, `1gbit; rank 1 at 100mbit`, `1gbit; rank 0 slowed to 50%`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_afd.errors import PlanError

UNSHAPED = "unshaped"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FAULT = re.compile(r"rank (\d+) (?:at (\w+(?:\.\w+)?)|slowed to (\d+)%)")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Links of one rate, and one rank that may be different."""

    rate: float | None
    """Bits per second of all links; None: as fast as they are."""
    rank: int | None = None
    """Who is different."""
    its_rate: float | None = None
    """Of this rank's link; None: that of all."""
    its_share: float = 1.0
    """Share of the time in which this rank may run."""


def parse_condition(text: str) -> Condition:
    """Read it; raises PlanError for anything else."""
    rate, *faults = (part.strip() for part in text.split(";"))
    if not faults:
        return Condition(rate=bits_of(rate))
    match = _FAULT.fullmatch(faults[0])
    share = int(match[3] or 100) if match else 0
    if match is None or len(faults) > 1 or not 0 < share <= 100:
        raise PlanError(f"rate {text}: behind the semicolon write `rank 1 at 100mbit` or `rank 1 slowed to 50%`")
    its_rate = bits_of(match[2]) if match[2] else None
    return Condition(rate=bits_of(rate), rank=int(match[1]), its_rate=its_rate, its_share=share / 100)


def plain_rate(text: str) -> float | None:
    """Bits per second of all links alike; None where there is no limit, or a rank that is different.

    For other texts, which name no condition, it is None, too.
    """
    try:
        condition = parse_condition(text)
    except PlanError:
        return None
    return condition.rate if condition.rank is None else None


def bits_of(rate: str) -> float | None:
    """Bits per second; None for a link without limit. Raises PlanError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if rate == UNSHAPED:
        return None
    if match is None or not float(match[1]):
        raise PlanError(f"rate {rate}: write {UNSHAPED}, or a number and kbit, mbit or gbit, such as 500mbit")
    return float(match[1]) * _UNITS[match[2]]
