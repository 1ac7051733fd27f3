"""Open a page in headless Chromium and read what it has become."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio")
SECONDS = 180

MEASURE = """
for (const panel of document.querySelectorAll("section.panel")) {
  const body = panel.querySelector(".body"), size = body.getBoundingClientRect();
  const seen = (selector) => [...body.querySelectorAll(selector)].filter((mark) => {
    const box = mark.getBoundingClientRect();
    return box.width > 0 || box.height > 0;
  }).length;
  panel.setAttribute("data-size", [size.width, size.height].map(Math.round).join(" "));
  panel.setAttribute("data-marks", [seen("svg path, svg rect, svg polyline, svg circle"), seen("td, dd")].join(" "));
}
const page = document.documentElement;
page.setAttribute("data-beyond", page.scrollWidth - page.clientWidth);
"""
"""Writes into each panel the size of its body in pixels, and how many drawn shapes and cells it shows."""


def find() -> str:
    """The path of Chromium; the test is skipped where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium is installed: apt-get install chromium")


def opened(content: str, folder: Path, script: str = MEASURE) -> str:
    """The page's elements after it has been shown and the script has been run, as text."""
    page = folder / "page.html"
    page.write_text(content.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [find(), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--window-size=1200,900", "--dump-dom"]
    process = subprocess.Popen(
        [*command, page.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=SECONDS)[0]
    finally:  # also the helpers that Chromium has started
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def attribute(page: str, tag: str, name: str) -> list[int]:
    """The numbers in an attribute of the first element whose tag has this text."""
    found = re.search(rf"<[^>]*\b{re.escape(tag)}[^>]*>", page)
    assert found is not None, f"no element with {tag}"
    value = re.search(rf'{name}="([^"]*)"', found[0])
    assert value is not None, f"{found[0]} has no {name}"
    return [int(float(number)) for number in value[1].split()]
