"""How many ranks each role gets: what a user has left open, by rule, or all that would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lightning_afd.errors import PlanError
from lightning_afd.namespace import MisconfigurationException
from lightning_afd.placement import Groups, Head, Layout, Neighbours

Open = Literal["auto"]
GROUPS = (1, 2, 4, 8)
"""Numbers of groups that are tried where they are left open."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a user says about the sizes of a layout."""

    attention: int | Open
    ffn: int | Open
    groups: Groups | Open
    head: Head
    neighbours: Neighbours = "roles"

    def _layout(self, attention: int, ffn: int, groups: Groups) -> Layout:
        return Layout(attention=attention, ffn=ffn, groups=groups, head=self.head, neighbours=self.neighbours)

    def layouts(self, world: int) -> tuple[Layout, ...]:
        """All layouts that use every rank."""
        groups = GROUPS if self.groups == "auto" else (self.groups,)
        return tuple(layout for each in groups for layout in self._with_groups(each, world))

    def _with_groups(self, groups: Groups, world: int) -> Iterator[Layout]:
        a, f = _pair(groups)
        for attention in range(1, world // a + 1) if self.attention == "auto" else (self.attention,):
            ffn, rest = divmod(world - a * attention, f)
            if ffn >= 1 and rest == 0 and self.ffn in ("auto", ffn):
                yield self._layout(attention, ffn, groups)

    def settled(self, world: int) -> Sizes:
        """With one group, or as many as make given sizes fit, where groups are left open."""
        if self.groups != "auto":
            return self
        fits = self.attention != "auto" and self.ffn != "auto" and world % (self.attention + self.ffn) == 0
        return replace(self, groups=world // (self.attention + self.ffn) if fits and world else 1)  # type: ignore[operator]

    def layout(self, world: int) -> Layout:
        """The layout of a job with `world` ranks, by rule: what is open gets the rest, or half of the ranks if it can.

        Raises MisconfigurationException where they do not fit.
        """
        sizes = self.settled(world)
        assert sizes.groups != "auto"
        attention, ffn = sizes._by_rule(world)
        try:
            layout = self._layout(attention, ffn, sizes.groups)
        except PlanError as error:
            raise MisconfigurationException(str(error)) from None
        if layout.world != world:
            raise MisconfigurationException(
                f"strategy afd with attention={attention}, ffn={ffn}, groups={sizes.groups} needs "
                f"{layout.world} ranks ({layout.describe()}), but the Trainer has {world} (devices x num_nodes): "
                f"set devices={layout.world}, or choose attention and ffn so that {_sum(sizes.groups)} = {world}"
            )
        return layout

    def _by_rule(self, world: int) -> tuple[int, int]:
        if world < 2:
            raise MisconfigurationException(
                f"strategy afd needs at least 2 ranks, one for attention and one for experts, but the Trainer has "
                f"{world}: set devices=2 or more (on CPU, devices='auto' is 1)"
            )
        assert self.groups != "auto"
        a, f = _pair(self.groups)
        if self.attention == "auto" and self.ffn == "auto":
            halves = sorted((abs(a * x.attention - f * x.ffn), -x.attention, x.ffn) for x in self.layouts(world))
            if not halves:
                raise MisconfigurationException(
                    f"strategy afd cannot divide {world} ranks into {self.groups} group(s) of attention and ffn: "
                    "use more ranks, or another number of groups"
                )
            return -halves[0][1], halves[0][2]
        if self.attention == "auto":
            assert self.ffn != "auto"
            return (world - f * self.ffn) // a, self.ffn
        return self.attention, (world - a * self.attention) // f if self.ffn == "auto" else self.ffn


def _pair(groups: Groups) -> tuple[int, int]:
    return (groups, groups) if isinstance(groups, int) else groups


def _sum(groups: Groups) -> str:
    """How many ranks there are, as a formula."""
    if isinstance(groups, int):
        return "groups * (attention + ffn)"
    return f"{groups[0]} * attention + {groups[1]} * ffn"
