"""The pages that users read: their blocks of code, links and tables."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GUIDE = (DOCS / "guide.md", *sorted((DOCS / "guide").glob("*.md")))
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *GUIDE[1:])


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    language: str
    text: str


def blocks(page: Path, language: str) -> Iterator[Block]:
    """Those of a language, in the order of the page."""
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if found[2] == language:
            indent = len(found[1])
            yield Block(page, language, "\n".join(line[indent:] for line in found[3].splitlines()))


def commands(page: Path) -> list[str]:
    """Lines of its shell blocks, without remarks."""
    lines = (line for block in blocks(page, "bash") for line in block.text.splitlines())
    return [bare for line in lines if (bare := re.sub(r"(^|\s)#.*", "", line).strip())]


def inline_commands(page: Path) -> list[str]:
    """Commands with arguments amid a page's text."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = (" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose))
    return [text for text in found if re.match(r"(lightning-afd|make|python|pip|torchrun) \S", text)]


def anchors(page: Path) -> set[str]:
    """What links into the page may name: its headings as GitHub writes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Targets of its links and pictures that are files of the project."""
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))
