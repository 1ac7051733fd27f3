"""One property: whatever the model, the layout, the order and the batches, a step equals the plain loop in float64.

A token id of a micro-batch may be negative: ~i stands for token i whose label is -100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from local_job import Batches, LocalJob, plain_step
from tiny import TinyMoE, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_afd import reduction
from lightning_afd.attention_hops import AttentionHops
from lightning_afd.model.experts import ExpertShard
from lightning_afd.model.port import Foreign
from lightning_afd.model.routing import Route
from lightning_afd.placement import Layout
from lightning_afd.schedule.actions import Action
from lightning_afd.schedule.orders import ORDERS
from lightning_afd.schedule.together import TOGETHER_ORDERS

TOLERANCE = 1e-12
NOISE = 1e-3  # a router's gradient may be zero by symmetry: what is left of it is rounding
VOCAB = 12
SHORTEST, LONGEST = 1, 5
"""Positions of a micro-batch; one position has no label."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a layout, what the plan chooses, and the shapes of the batches."""

    layout: Layout
    sizes: dict[str, Any]
    """Fields of TinyConfig."""
    choices: dict[str, Any]
    """Fields of Plan."""
    shapes: tuple[tuple[tuple[int, int, str], ...], ...]
    """Rows, positions and which labels are masked, of the micro-batches of each replica."""
    steps: int
    """The last one is compared: layers are looked at in the first."""

    def model(self) -> TinyMoE:
        """The whole model."""
        return tiny(vocab=VOCAB, hidden=4, expert_width=3, **self.sizes).double()

    def batches(self) -> Batches:
        """Seeded ids."""
        generator = torch.Generator().manual_seed(len(self.shapes))
        return [[_ids(*shape, generator) for shape in replica] for replica in self.shapes]


def _ids(rows: int, positions: int, masked: str, generator: torch.Generator) -> Tensor:
    ids_BS = torch.randint(0, VOCAB, (rows, positions), generator=generator)
    hidden_BS = torch.rand(rows, positions, generator=generator) < {"none": 0.0, "some": 0.5, "all": 1.0}[masked]
    return torch.where(hidden_BS, ~ids_BS, ids_BS)


def masked_loss(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Mean next-token loss over the labels that are not masked (NaN where all are), and the auxiliary loss."""
    hidden_BS = ids_BS < 0
    out = model(torch.where(hidden_BS, ~ids_BS, ids_BS))
    labels_BS = ids_BS.masked_fill(hidden_BS, -100)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels_BS[:, 1:].flatten())
    return loss if out.aux_loss is None else loss + out.aux_loss


def difference(case: Case) -> float:
    """How far loss and gradients of all replicas are from those of the plain loop, relatively."""
    model, batches = case.model(), case.batches()
    job = LocalJob(model, case.layout, loss=masked_loss, **case.choices)
    for _ in range(case.steps):
        outcome = job.step(batches)
    return outcome.difference(*plain_step(model, batches, masked_loss), NOISE)


@st.composite
def sizes_of_models(draw: st.DrawFn, ffn: int) -> dict[str, Any]:
    """One to four layers, some of them dense; every F rank gets at least one expert."""
    routed = draw(st.lists(st.booleans(), min_size=1, max_size=4).filter(any))
    experts = draw(st.integers(max(ffn, 2), 5))
    top_k = draw(st.integers(1, min(experts, 3)))
    return {
        "layers": len(routed),
        "dense": tuple(index for index, has_experts in enumerate(routed) if not has_experts),
        "experts": experts,
        "top_k": top_k,
        "aux": 0.1 if top_k == 1 else draw(st.sampled_from([0.0, 0.1])),  # nothing else moves a top-1 router
        "shared_expert": draw(st.booleans()),
        "tied": draw(st.booleans()),
    }


GROUPS = st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3))
APART = st.builds(
    Layout, attention=st.integers(1, 3), ffn=st.integers(1, 3), groups=GROUPS, node_ranks=st.integers(1, 4)
)
LAYOUTS = APART.filter(lambda layout: layout.world <= 12) | st.builds(Layout.together, st.integers(1, 3))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Anything that can be planned; the first micro-batch has labels, so that there is a loss."""
    layout = draw(LAYOUTS)
    shape = st.tuples(st.integers(1, 2), st.integers(SHORTEST, LONGEST), st.sampled_from(["none", "some", "all"]))
    most = draw(st.integers(1, 4))
    shapes = [draw(st.lists(shape, min_size=1, max_size=most)) for _ in range(layout.attention)]
    shapes[0][0] = (shapes[0][0][0], LONGEST, "none")
    choices = {
        "micro_batches": most,
        "order": draw(st.sampled_from(sorted(TOGETHER_ORDERS if layout.collocated else ORDERS))),
        "dedup": draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "attention", "full"])),
        "recompute_experts": draw(st.booleans()),
    }
    return Case(
        layout=layout,
        sizes=draw(sizes_of_models(layout.ffn)),
        choices=choices,
        shapes=tuple(map(tuple, shapes)),
        steps=draw(st.integers(1, 2)),
    )


@settings(derandomize=True, max_examples=200, deadline=None, database=None)
@given(cases())
def test_a_step_equals_the_plain_loop(case: Case) -> None:
    assert difference(case) < TOLERANCE


def without_weight_gradient(shard: ExpertShard, _pending: Any) -> None:
    shard.zero_missing_gradients()


def with_two_ranks_swapped(route: Route, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of F ranks 0 and 1 change places where there are as many of each."""
    if len(parts) > 1 and parts[0].shape == parts[1].shape:
        parts = [parts[1], parts[0], *parts[2:]]
    return SUM_COPIES(route, parts, dtype)


def without_gradient_of_the_base(hops: AttentionHops, action: Action) -> None:
    HOP_GRADIENT(hops, action)
    flight = hops._flight[action.micro_batch]
    if flight.dh_TH is not None:
        flight.dh_TH.zero_()


def nothing(*_args: Any) -> None:
    """In place of a function that matters."""


SUM_COPIES, HOP_GRADIENT = Route.sum_copies, AttentionHops._hop_gradient


def test_the_property_fails_where_rows_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Route, "sum_copies", with_two_ranks_swapped)
    once = settings(derandomize=True, max_examples=60, deadline=None, database=None, phases=[Phase.generate])
    assert find(cases(), lambda case: difference(case) > 1e-6, settings=once).layout.ffn > 1


WHOLE = Case(
    layout=Layout(attention=2, ffn=2, groups=2),
    sizes={"layers": 4, "dense": (1,), "aux": 0.1, "experts": 5, "tied": True},
    choices={"micro_batches": 2},
    shapes=(((2, 5, "some"), (1, 4, "none")), ((1, 5, "none"), (2, 3, "all"))),
    steps=1,
)


@pytest.mark.parametrize(
    ("target", "name", "broken"),
    [
        (ExpertShard, "weight_gradient", without_weight_gradient),
        (AttentionHops, "_hop_gradient", without_gradient_of_the_base),
        (Foreign, "_stand_in", nothing),  # the layers of other groups are left out of the model's collector
        (reduction, "sum_over_replicas", nothing),
    ],
)
def test_one_case_fails_where_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, broken: Callable[..., Any]
) -> None:
    assert difference(WHOLE) < TOLERANCE
    monkeypatch.setattr(target, name, broken)
    assert difference(WHOLE) > 1e-6
