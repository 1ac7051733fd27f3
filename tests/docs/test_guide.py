"""The guide: links lead somewhere, code can be read, options and sentences are those of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import pytest
from doc_pages import DOCS, GUIDE, PAGES, ROOT, anchors, blocks, links

from lightning_afd.strategies.config import AFDConfig, EPConfig

TROUBLE = DOCS / "guide" / "troubleshooting.md"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert not lost, lost


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "reference.md"], ids=named)
def test_python_in_it_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block.text)


def test_index_lists_all_chapters() -> None:
    index = (DOCS / "guide.md").read_text()
    assert [f"guide/{page.name}" in index for page in GUIDE[1:]] == [True] * 9


def option_rows() -> dict[str, str]:
    """Options of the table, each with its default, which two options of a row may share."""
    found = {}
    for row in re.findall(r"^\| (`.*?) \| (.*?) \|", (DOCS / "guide" / "options.md").read_text(), re.MULTILINE):
        names = re.findall(r"`(\w+)`", row[0])
        defaults = row[1].split(", ") if len(names) > 1 and "," in row[1] else [row[1]] * len(names)
        found |= dict(zip(names, defaults, strict=True))
    return found


def test_options_are_those_of_the_strategy() -> None:
    assert option_rows().keys() == {field.name for field in fields(AFDConfig)}


def test_defaults_are_those_of_the_strategy() -> None:
    rows = option_rows()
    in_words = {"planning", "pace", "timeout"}
    for field in fields(AFDConfig):
        if field.name not in in_words:
            assert field.default is not MISSING
            assert ast.literal_eval(rows[field.name].strip("`")) == field.default, field.name


def test_collocated_strategies_lack_what_the_page_says() -> None:
    text = (DOCS / "guide" / "options.md").read_text().partition("have the same options without")[2]
    missing = set(re.findall(r"`(\w+)`", text.partition("Their defaults")[0]))
    assert missing == {field.name for field in fields(AFDConfig)} - {field.name for field in fields(EPConfig)}


GAP = "\0"
"""What stands for a value in a sentence."""


@cache
def sentences() -> str:
    """All texts of the package, with gaps for values."""
    files = [path for folder in ("lightning_afd", "strategies", "recipes") for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(text for path in files for text in _texts(ast.parse(path.read_text())))


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted() -> Iterator[str]:
    """What the tables of symptoms say that a message says."""
    table = ""
    for line in TROUBLE.read_text().splitlines():
        table = line if line.startswith("| what it says") or line.startswith("| symptom") else table
        if line.startswith("| `") or (line.startswith("| ") and "what it says" in table):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


def parts_of(sentence: str) -> list[str]:
    """What stands in it word by word: numbers, dots and examples are values."""
    return [part.strip() for part in re.split(r"\bn\b|\.\.\.|\bF0\b", sentence) if len(part.strip()) > 7]


def test_sentences_are_those_of_the_package() -> None:
    strange = [part for sentence in quoted() for part in parts_of(sentence) if part not in sentences()]
    assert not strange, strange


def test_a_sentence_that_nobody_says_is_found() -> None:
    assert parts_of("rank n (F0) ... stopped without a word") == ["stopped without a word"]
    assert "needs at least n gremlins" not in sentences() and len(list(quoted())) > 80
