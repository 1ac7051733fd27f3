"""Write docs/reference.md out of the docstrings: `python docs/make_reference.py`. Sources are parsed, not imported."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from reference_parts import PARTS, Part

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
INTRODUCTION = """# Reference

Written by `python docs/make_reference.py` from the docstrings. Tensor names say their shape: T tokens, H hidden width,
E experts, K experts per token (top-k), R rows, B batch, S sequence. Times are seconds and sizes bytes unless a name or
line says otherwise. Papers are named by their number at arXiv.
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that has a place in the reference."""

    name: str
    call: str
    """As it is written in Python, without its body."""
    doc: str
    fields: tuple[Entry, ...] = ()
    methods: tuple[Entry, ...] = ()

    def undocumented(self) -> Iterator[str]:
        """Names that nothing is said about; fields may be clear from what is said about their class."""
        for part in (self, *self.methods):
            if not part.doc:
                yield self.name if part is self else f"{self.name}.{part.name}"


def page(parts: Sequence[Part] = PARTS) -> str:
    """The whole page."""
    contents = "\n".join(f"- [{part.title}](#{_anchor(part.title)})" for part in parts)
    return "\n".join((INTRODUCTION, contents, "", *(_part(part) for part in parts)))


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _part(part: Part) -> str:
    texts = [f"## {part.title}\n"]
    for module, names in part.names.items():
        if "" in names:
            texts.append(f"{_module_doc(module)}\n")
        texts += [_entry(entry, module) for entry in entries(module, names)]
    return "\n".join(texts)


def entries(module: str, names: Sequence[str]) -> list[Entry]:
    """What a module says about some of its names; KeyError for a name that it has not."""
    found = {name: made for name, made in _entries_of(_tree(module))}
    return [found[name] for name in names if name]


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(), filename=str(file))


def _module_doc(module: str) -> str:
    return ast.get_docstring(_tree(module)) or ""


def _entries_of(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, Entry]]:
    """Everything at the top of a module or class, by name."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef):
            yield node.name, _class(node)
        elif isinstance(node, ast.FunctionDef):
            yield node.name, _function(node)
        elif name := _assigned(node):
            yield name, Entry(name=name, call=ast.unparse(node), doc=_text_beneath(after))


def _assigned(node: ast.stmt) -> str:
    """The name that a statement gives a value or a type, if it is one."""
    target = (
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    )
    return target.id if isinstance(target, ast.Name) else ""


def _text_beneath(node: ast.stmt | None) -> str:
    """The string that stands beneath a field or constant."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _function(node: ast.FunctionDef) -> Entry:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    back = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    call = f"{node.name}{back}" if decorators & {"property", "cached_property"} else f"{node.name}({arguments}){back}"
    return Entry(name=node.name, call=call, doc=ast.get_docstring(node) or "")


def _class(node: ast.ClassDef) -> Entry:
    """A class with its fields and methods; what a base has words for is left out where it has none of its own."""
    own = [(name, entry) for name, entry in _entries_of(node) if not name.startswith("_")]
    overriding = {part.name for part in node.body if isinstance(part, ast.FunctionDef) and _overrides(part)}
    functions = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    is_value = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list) or _is_tuple(node)
    bases = f"({', '.join(ast.unparse(base) for base in node.bases)})" if node.bases else ""
    return Entry(
        name=node.name,
        call=f"class {node.name}{bases if is_value else _constructor(node) or bases}",
        doc=ast.get_docstring(node) or "",
        fields=tuple(entry for name, entry in own if name not in functions and (entry.doc or is_value)),
        methods=tuple(entry for name, entry in own if name in functions - overriding and (entry.doc or not node.bases)),
    )


def _is_tuple(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "NamedTuple" for base in node.bases)


def _overrides(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "override" for decorator in node.decorator_list) or node.name.startswith("on_")


def _constructor(node: ast.ClassDef) -> str:
    """Its arguments; of a base nothing is known here."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return _function(part).call.removeprefix("__init__").removesuffix(" -> None")
    return ""


def _entry(entry: Entry, module: str) -> str:
    place = "lightning_afd" if entry.name in exported() else module
    lines = [
        f"### `{entry.name}`\n",
        f"`from {place} import {entry.name}`\n",
        f"```python\n{_wrapped(entry.call)}\n```\n",
        f"{entry.doc}\n",
    ]
    if entry.fields:
        lines += ["| field | what it is |", "|---|---|", *map(_row, entry.fields), ""]
    lines += [f"- `{method.call}`: {_one_line(method.doc)}" for method in entry.methods]
    return "\n".join((*lines, "") if entry.methods else lines)


@cache
def exported() -> frozenset[str]:
    """Names of the package itself."""
    (names,) = (node.value for node in _tree("lightning_afd").body if _assigned(node) == "__all__")  # type: ignore[attr-defined]
    return frozenset(ast.literal_eval(names))


def _row(field: Entry) -> str:
    return f"| `{_cell(field.call)}` | {_cell(field.doc)} |"


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _wrapped(call: str, width: int = 110) -> str:
    """A call over as many lines as it needs, cut behind commas."""
    if len(call) <= width:
        return call
    words, lines = call.split(", "), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("    ")
        lines[-1] += word if not lines[-1].strip() else f", {word}"
    return ",\n".join(lines)


def main() -> None:
    """Write the page."""
    (DOCS / "reference.md").write_text(page())


if __name__ == "__main__":
    main()
