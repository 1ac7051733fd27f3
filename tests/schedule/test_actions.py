import dataclasses

import pytest

from lightning_afd.schedule.actions import Action


@pytest.mark.parametrize(
    "name", ["A3f0", "A94b31", "E0f0", "E12b3", "E1w2", "A3w0", "D0f10", "C7b1", "H2f0", "L5b4", "S2b7", "X3f0", "Y2b1"]
)
def test_name_parses_back(name: str) -> None:
    assert str(Action.parse(name)) == name
    assert Action.parse(str(Action.parse(name))) == Action.parse(name)


def test_parts_of_a_name() -> None:
    assert Action.parse("E12w3") == Action("E", 12, "w", 3)


@pytest.mark.parametrize(
    "name", ["", "A3f", "Z3f0", "X3w0", "T3w0", "D1w0", "S1f0", "A3x0", "a3f0", "A3f0 ", "A-1f0", "A03f0", "A3f00"]
)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        Action.parse(name)


def test_transfers_are_the_actions_between_ranks() -> None:
    assert [op for op in "AETDCXYHL" if Action.parse(f"{op}0f0").is_transfer] == list("DCXYHL")


def test_an_action_is_a_value() -> None:
    action = Action("A", 0, "f", 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        action.layer = 1  # type: ignore[misc]
    assert not hasattr(action, "__dict__")
