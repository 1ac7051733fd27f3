"""The engine's own time: of any layout, small or large."""

from __future__ import annotations

import pytest

from lightning_afd.bench.overhead import EXPERTS, BareShape, costs
from lightning_afd.placement import Layout


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        (Layout(attention=1, ffn=2), {"A", "F"}),
        (Layout(attention=1, ffn=EXPERTS + 1), {"A", "F"}),
        (Layout.together(EXPERTS + 1), {"AF"}),
    ],
    ids=["few experts", "more ranks than experts", "both roles"],
)
def test_it_is_measured_with_more_ranks_than_experts_too(layout: Layout, roles: set[str]) -> None:
    order = "sequential" if layout.collocated else "af-pipe"
    bare = BareShape(layout=layout, order=order, layers=2, micro_batches=2)
    found = costs(bare, steps=1)
    assert set(found) == roles
    assert all(cost.step > 0 and cost.actions > 0 for cost in found.values())
    assert bare.experts == max(EXPERTS, layout.ffn)
