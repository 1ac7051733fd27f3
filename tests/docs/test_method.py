"""The pictures of docs/method.md show what the simulator says today."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from doc_pages import DOCS, script
from PIL import Image

from lightning_afd.schedule.shape import Shape

draw_method = script("draw_method")
PICTURES = {picture.name: picture for picture in draw_method.pictures()}


def shown(path: Path) -> str:
    """The digest of what a picture was drawn from."""
    with Image.open(path) as image:
        return str(image.text[draw_method.KEY])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_up_to_date(name: str) -> None:
    assert shown(DOCS / "pictures" / f"{name}.png") == PICTURES[name].digest(), "run python docs/draw_method.py"


def test_page_shows_all_pictures_and_their_figures() -> None:
    page = (DOCS / "method.md").read_text()
    assert page == draw_method.with_table(page, draw_method.table(PICTURES)), "run python docs/draw_method.py"
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == PICTURES.keys()
    for name in PICTURES:
        assert f"](pictures/{name}.png)" in page


def test_a_changed_schedule_is_seen(tmp_path: Path) -> None:
    other = draw_method.apart("", "sequential", Shape(layers=1, micro_batches=2))
    changed = replace(PICTURES["one_micro_batch"], simulation=other.simulation)
    changed.draw(tmp_path)
    assert shown(tmp_path / "one_micro_batch.png") == changed.digest() != PICTURES["one_micro_batch"].digest()


def test_what_the_page_says_about_the_pictures() -> None:
    """Orders hide what they are said to hide, and the comparison at the end of the page holds."""
    steps = {name: picture.simulation.seconds for name, picture in PICTURES.items()}
    assert steps["layer_major"] < 0.7 * steps["sequential"]
    assert steps["zero_bubble"] < steps["groups"]
    assert steps["flowmoe"] < steps["experts_only"] < steps["ep"]
    assert steps["flowmoe"] == min(steps[name] for name in ("flowmoe", "ep", "sequential", "layer_major", "af_pipe"))


@pytest.mark.parametrize("name", [name for name, picture in PICTURES.items() if picture.is_collocated])
def test_rows_of_collocated_ranks_add_up(name: str) -> None:
    """One after another, without a hole, and as much computed as simulated."""
    timeline, simulation = PICTURES[name].timeline, PICTURES[name].simulation
    spans = timeline.by_rank[0]
    assert all(before.end == pytest.approx(after.start) for before, after in pairwise(spans))
    computed = sum(span.seconds for span in spans if not span.action.is_transfer)
    (busy,) = (seconds for (_, _, way), seconds in simulation.busy.items() if way == "compute")
    assert computed == pytest.approx(busy)
