"""Link rates as text: `500mbit`, `1gbit`, `unshaped`."""

from __future__ import annotations

import re

from lightning_afd.errors import PlanError

UNSHAPED = "unshaped"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_of(rate: str) -> float | None:
    """Bits per second; None for a link without limit. Raises PlanError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if rate == UNSHAPED:
        return None
    if match is None or not float(match[1]):
        raise PlanError(f"rate {rate}: write {UNSHAPED}, or a number and kbit, mbit or gbit, such as 500mbit")
    return float(match[1]) * _UNITS[match[2]]
