"""docs/reference.md is what the docstrings say today, and nothing in it is without words."""

from __future__ import annotations

import ast

import pytest
from doc_pages import DOCS, script

make_reference = script("make_reference")
PARTS = make_reference.PARTS


def test_page_is_up_to_date() -> None:
    assert (DOCS / "reference.md").read_text() == make_reference.page(), "run python docs/make_reference.py"


def test_everything_in_it_is_documented() -> None:
    silent = [
        f"{module}: {name}"
        for part in PARTS
        for module, names in part.names.items()
        for entry in make_reference.entries(module, names)
        for name in entry.undocumented()
    ]
    assert not silent, silent


def test_exported_names_are_in_it() -> None:
    import lightning_afd

    listed = {name for part in PARTS for names in part.names.values() for name in names}
    assert set(lightning_afd.__all__) == make_reference.exported() <= listed


SAMPLE = '''
@dataclass(frozen=True)
class Value:
    """One value."""

    size: int = 1
    """In bytes | or bits."""
    other: str
    _private: int

    def named(self, *, name: str) -> str:
        """Its name."""

    @property
    def half(self) -> float:
        return self.size / 2

    @override
    def told(self) -> None: ...
'''


def test_words_beneath_fields_and_of_methods_are_found() -> None:
    ((name, entry),) = make_reference._entries_of(ast.parse(SAMPLE))
    assert (name, entry.call, entry.doc) == ("Value", "class Value", "One value.")
    assert [(field.call, field.doc) for field in entry.fields] == [
        ("size: int = 1", "In bytes | or bits."),
        ("other: str", ""),
    ]
    assert [method.call for method in entry.methods] == ["named(*, name: str) -> str", "half -> float"]
    assert list(entry.undocumented()) == ["Value.half"]
    assert make_reference._row(entry.fields[0]) == "| `size: int = 1` | In bytes \\| or bits. |"


def test_a_name_that_is_gone_is_an_error() -> None:
    with pytest.raises(KeyError):
        make_reference.entries("lightning_afd.errors", ("NoError",))
