"""Layouts whose ranks of both roles take turns: one step equals the plain loop, in float64."""

import pytest
from local_job import LocalJob, make_batches, plain_step
from tiny import tiny

from lightning_afd.placement import Groups, Head, Layout


@pytest.mark.parametrize("head", ["attention", "ffn"])
@pytest.mark.parametrize(
    ("attention", "ffn", "groups"), [(2, 2, 1), (1, 3, 1), (3, 2, 1), (2, 1, 2), (1, 2, 3), (1, 2, (2, 1))]
)
def test_step_equals_the_plain_loop(attention: int, ffn: int, groups: Groups, head: Head) -> None:
    layout = Layout(attention=attention, ffn=ffn, groups=groups, head=head, neighbours="groups")
    model = tiny(layers=4, hidden=8, expert_width=4, aux=0.05, shared_expert=True, dense_first=1).double()
    batches = make_batches(attention, 2)
    order = "zero-bubble" if groups == 1 else "af-pipe"
    assert LocalJob(model, layout, order).step(batches).difference(*plain_step(model, batches)) < 1e-12
