"""Tests that need network namespaces: skipped, with the reason, where this process cannot make or shape them."""

import pytest

from lightning_afd.bench.namespaces import network
from lightning_afd.errors import PlanError


def refusal() -> str:
    """Why there can be none; empty where one was made."""
    try:
        with network(1, rate=1e9):
            return ""
    except PlanError as error:
        return str(error)


REFUSAL = refusal()
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
