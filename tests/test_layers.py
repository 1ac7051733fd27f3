"""Imports inside the package point downwards only, and the pure half needs neither torch nor Lightning.

The layers are those of the package, lowest first. Every import statement counts, also one inside a function or for
type checkers only: a module that is not in a layer, or that looks up, is an error with its place.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_afd"
MAX_LINES = 350

PURE = (
    *(
        "errors",
        "placement",
        "expert_map",
        "packing",
        "nics",
        "schedule",
        "peers",
        "timeline",
        "draw",
        "waits",
        "regime",
        "recording",
    ),
    *("cost", "backlog", "lanes", "load", "simulate", "baselines", "allocate", "tune", "report"),
)
TORCH = (
    *(
        "device",
        "model",
        "transport",
        "expert_load",
        "flattened",
        "batch",
        "documents",
        "segments",
        "sent",
        "gradients",
    ),
    *("reduction", "optimizer", "plan"),
    *("clock", "runtime", "receives", "in_flight", "tail_rank", "attention_hops", "attention_rank"),
    *("asked", "ffn_rank", "node_relay"),
    *("owned", "engine", "rehearsal", "checkpoint", "calibrate"),
)
LIGHTNING = (
    *("namespace", "callbacks", "corpus", "data", "strategies", "bench"),
    *("conf", "recipes", "_registration", "__init__"),
)
LAYERS = PURE + TORCH + LIGHTNING

HEAVY_FOR_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "hydra", "rich"}
HEAVY = HEAVY_FOR_LIGHTNING | {"torch", "transformers", "tokenizers", "greenlet"}
LINKED_FOLDERS = {"strategies", "conf", "recipes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported module, by full name, and the place of its import statement."""

    importer: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def modules_of(package: Path) -> dict[str, Path]:
    """Map full module names to files; symbolic links to folders are followed."""
    found = {}
    for folder, _, files in os.walk(package, followlinks=True):
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = (package.name, *path.relative_to(package).with_suffix("").parts)
                found[".".join(parts)] = path
    return found


def imports_of(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[Import]:
    """Yield every import of the file, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer=name, target=module_name(alias.name, known), line=node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(name.split(".")[: -node.level] + ([base] if base else []))
            for alias in node.names:
                yield Import(importer=name, target=module_name(f"{base}.{alias.name}", known), line=node.lineno)


def module_name(dotted: str, known: Mapping[str, Path]) -> str:
    """Return the module of our package that holds the name, or the name itself where it is foreign."""
    if dotted.split(".")[0] != PACKAGE:
        return dotted
    for end in range(dotted.count(".") + 1, 0, -1):
        prefix = ".".join(dotted.split(".")[:end])
        for candidate in (prefix, f"{prefix}.__init__"):
            if candidate in known:
                return candidate
    return dotted


def layer_of(module: str) -> str:
    """Return the part of the package a module belongs to: its first name below the package."""
    return module.split(".")[1] if "." in module else "__init__"


def violations(package: Path) -> list[str]:
    """Return one sentence for each import that the layers forbid, and for each module outside of them."""
    known = modules_of(package)
    unknown = sorted(name for name in known if layer_of(name) not in LAYERS)
    problems = [f"{name} is in no layer" for name in unknown]
    graph: dict[str, set[str]] = {}
    for name in sorted(known.keys() - set(unknown)):
        for found in imports_of(name, known[name], known):
            problem = _forbidden(found)
            if problem:
                problems.append(f"{found}: {problem}")
            elif found.target in known:
                graph.setdefault(name, set()).add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("modules import each other: " + " -> ".join(error.args[1]))
    return problems


def _forbidden(found: Import) -> str | None:
    """Say what is wrong with an import, if anything."""
    top, own = found.target.split(".")[0], layer_of(found.importer)
    if top in LINKED_FOLDERS:
        return f"write {PACKAGE}.{top}"
    if top != PACKAGE:
        heavy = HEAVY if own in PURE else HEAVY_FOR_LIGHTNING if own in TORCH else set()
        return f"{own} must not need {top}" if top in heavy else None
    target = layer_of(found.target)
    if target not in LAYERS:
        return f"{found.target} is in no layer"
    return "upwards" if LAYERS.index(target) > LAYERS.index(own) else None


def too_long(folder: Path) -> list[str]:
    """Name the Python files with more lines than allowed."""
    lengths = {path: len(path.read_text().splitlines()) for path in modules_of(folder).values()}
    return [f"{path.name} has {lines} lines" for path, lines in lengths.items() if lines > MAX_LINES]


def test_imports_point_downwards_only() -> None:
    problems = violations(ROOT / PACKAGE)
    assert not problems, "\n".join(problems)


def test_all_layers_below_linked_folders_are_seen() -> None:
    seen = {layer_of(name) for name in modules_of(ROOT / PACKAGE)}
    assert {"errors", "schedule", "strategies", "conf", "recipes"} <= seen


@pytest.mark.parametrize("folder", [PACKAGE, "tests"])
def test_files_are_short(folder: str) -> None:
    assert not too_long(ROOT / folder)


def heavy_after(statement: str) -> set[str]:
    """Return the heavy libraries that a new interpreter has loaded after the statement."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return HEAVY & set(done.stdout.split())


def test_pure_half_loads_nothing_heavy() -> None:
    pure = [name.removesuffix(".__init__") for name in modules_of(ROOT / PACKAGE) if layer_of(name) in PURE]
    assert heavy_after(f"import {', '.join(pure)}") == set()
    assert heavy_after("import greenlet") == {"greenlet"}


GOOD_TREE = {
    "__init__.py": "import lightning\nfrom .strategies import afd\n",
    "errors.py": "import math\n",
    "schedule/__init__.py": "",
    "schedule/actions.py": "from lightning_afd.errors import PlanError\n",
    "schedule/shape.py": "from .actions import Action\nfrom ..errors import PlanError\n",
    "model/__init__.py": "",
    "model/port.py": "import torch\nimport greenlet\nfrom lightning_afd.schedule import shape\n",
    "strategies/__init__.py": "",
    "strategies/afd.py": "import lightning.pytorch\nfrom lightning_afd.model.port import Port\n",
}


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / PACKAGE


def test_checker_accepts_a_layered_tree(tmp_path: Path) -> None:
    assert violations(write_tree(tmp_path, GOOD_TREE)) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("errors.py", "import torch.nn", "errors must not need torch"),
        ("schedule/shape.py", "def f():\n    from transformers import X", "schedule must not need transformers"),
        ("schedule/shape.py", "from greenlet import greenlet", "schedule must not need greenlet"),
        ("model/port.py", "import lightning.pytorch as pl", "model must not need lightning"),
        ("errors.py", "from lightning_afd.schedule.actions import Action", "upwards"),
        ("schedule/shape.py", "from ..model import port", "upwards"),
        ("model/port.py", "import lightning_afd", "upwards"),
        ("schedule/actions.py", "from .shape import Shape", "modules import each other"),
        ("model/port.py", "from strategies.afd import X", "write lightning_afd.strategies"),
        ("helpers.py", "", "lightning_afd.helpers is in no layer"),
    ],
)
def test_checker_finds_what_is_forbidden(tmp_path: Path, file: str, text: str, expected: str) -> None:
    problems = violations(write_tree(tmp_path, GOOD_TREE | {file: text}))
    assert len(problems) == 1
    assert expected in problems[0]


def test_checker_finds_long_files_behind_links(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "long.py").write_text("\n" * (MAX_LINES + 1))
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "strategies").symlink_to("../outside")
    assert too_long(tmp_path / PACKAGE) == ["long.py has 351 lines"]
