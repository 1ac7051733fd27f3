"""The page: one small file that needs nothing else, and whose panels a browser shows."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import MEASURE, attribute, opened
from recorded import recorded
from reports import run_folder, run_of, step_of

import lightning_afd
from lightning_afd.expert_map import ExpertMap
from lightning_afd.report import PANELS, REPORT, has_recordings, write_report
from lightning_afd.report.page import page, section
from lightning_afd.schedule.shape import Shape

DRAWN = {"timelines", "shares", "experts", "loss", "drift"}
"""Panels with a picture; the others are tables."""


def test_report_is_one_file_beside_the_recordings(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    assert has_recordings(run) and not has_recordings(run / "logs" / "trace")
    path = lightning_afd.write_report(run)
    assert path == run / REPORT and path.stat().st_size < 200_000
    assert write_report(run, out=run / "deep" / "er.html", step=10).read_text().count(
        "step 10"
    ) > path.read_text().count("step 10")
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "deep", "logs", "report.html"]


def test_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    content = write_report(run_folder(tmp_path)).read_text()
    assert not re.findall(r"https?:|\bsrc=|url\(|@import|<link|<iframe|<img", content)
    assert re.findall(r'href="([^#][^"]*)"', content) == []
    assert "prefers-color-scheme: dark" in content


class Balance(HTMLParser):
    """Counts elements that are opened and not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_page_is_well_formed_whatever_names_are() -> None:
    bad = "<b>&\"'"
    run = run_of(step_of(Shape(layers=2, micro_batches=2), order="af-pipe"), name=bad, model=bad)
    content = page(replace(run, metrics={f"loss{bad}": ((1.0, 2.0),)}))
    parser = Balance()
    parser.feed(content)
    assert (parser.open, parser.wrong) == ([], [])
    assert "<b>&\"'" not in content and content.count("&lt;b&gt;&amp;") >= 4


def test_each_panel_says_how_to_read_it() -> None:
    assert [panel.key for panel in PANELS] == [
        *("summary", "timelines", "shares", "waits", "traffic", "experts", "loss", "drift")
    ]
    for panel in PANELS:
        assert panel.how.endswith(".") and panel.how.count(". ") == 0


def test_a_large_step_stays_small() -> None:
    shape = Shape(layers=16, micro_batches=24, groups=2)
    wide = {
        "expert_maps": (ExpertMap.contiguous(256, 1),) * 16,
        "tokens_per_expert": (tuple(range(256)),) * 16,
    }
    content = page(run_of(step_of(shape, **wide)))
    assert len(content) < 400_000


def test_browser_shows_every_panel(tmp_path: Path) -> None:
    content = write_report(run_folder(tmp_path)).read_text()
    empty = section(replace(PANELS[0], key="nothing", body=lambda run: ""), run_of(recorded()))
    hidden = section(replace(PANELS[0], key="hidden", body=lambda run: "<svg></svg>"), run_of(recorded()))
    clicks = "document.querySelectorAll('.zooms button')[3].click();"
    wide = "document.querySelector('svg.lanes').setAttribute('data-wide', Math.round("
    wide += "document.querySelector('svg.lanes').clientWidth / document.querySelector('.scroll').clientWidth));"
    shown = opened(content.replace("<script>", empty + hidden + "<script>", 1), tmp_path, MEASURE + clicks + wide)
    for panel in PANELS:
        width, height = attribute(shown, f'id="{panel.key}"', "data-size")
        shapes, cells = attribute(shown, f'id="{panel.key}"', "data-marks")
        assert width > 800 and height > 60, panel.key
        assert shapes > 0 if panel.key in DRAWN else cells > 3, panel.key
    assert attribute(shown, 'id="nothing"', "data-size")[1] == 0
    assert attribute(shown, 'id="hidden"', "data-marks") == [0, 0]
    assert attribute(shown, "html lang", "data-beyond") == [0], "the page is wider than its window"
    assert attribute(shown, 'class="lanes"', "data-wide") == [8], "the time axis does not stretch"


@pytest.mark.parametrize("name", ["chromium", "google-chrome"])
def test_browser_is_found_or_the_test_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from browser import find

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="no Chromium is installed"):
        find()
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    assert find() == str(tmp_path / name)
