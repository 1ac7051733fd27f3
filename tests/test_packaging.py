"""What users install is what the checkout has: links resolve, wheel and sdist hold the same files, and they import."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_afd"
LINKS = ("strategies", "conf", "recipes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The archives of one build: sdist, the wheel made from it, and the wheel made from the checkout."""

    sdist: Path
    wheel: Path
    wheel_of_checkout: Path


def run_python(*arguments: str, folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a folder, with `path` as the only entry of PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build once per session, with the build backend that is installed here."""
    both, direct = tmp_path_factory.mktemp("both"), tmp_path_factory.mktemp("direct")
    checked(run_python("-m", "build", "--no-isolation", "--outdir", str(both), str(ROOT), folder=both))
    checked(run_python("-m", "build", "--no-isolation", "--wheel", "--outdir", str(direct), str(ROOT), folder=direct))
    (sdist,), (wheel,), (other,) = both.glob("*.tar.gz"), both.glob("*.whl"), direct.glob("*.whl")
    return Built(sdist=sdist, wheel=wheel, wheel_of_checkout=other)


def package_files(names: Iterable[str]) -> set[str]:
    """Keep the files of the package itself, without caches and folders."""
    return {name for name in names if name.startswith(f"{PACKAGE}/") and "__pycache__" not in name and name[-1] != "/"}


def files_in_checkout() -> set[str]:
    walk = os.walk(ROOT / PACKAGE, followlinks=True)
    return package_files(Path(folder, file).relative_to(ROOT).as_posix() for folder, _, files in walk for file in files)


def files_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return package_files(archive.namelist())


def files_in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return package_files(member.name.partition("/")[2] for member in archive if member.isfile())


@pytest.mark.parametrize("name", LINKS)
def test_links_of_the_package_are_relative_and_resolve(name: str) -> None:
    link = ROOT / PACKAGE / name
    assert link.is_symlink(), f"{link} is no symbolic link: clone with `git config core.symlinks true`"
    assert link.readlink() == Path("..", name)
    assert (link / "__init__.py").is_file()


def test_wheel_and_sdist_hold_the_files_of_the_checkout(built: Built) -> None:
    expected = files_in_checkout()
    assert files_in_sdist(built.sdist) == expected
    assert files_in_wheel(built.wheel) == expected
    assert files_in_wheel(built.wheel_of_checkout) == expected
    assert {f"{PACKAGE}/conf/config.yaml", f"{PACKAGE}/strategies/__init__.py", f"{PACKAGE}/py.typed"} <= expected


def test_wheel_has_nothing_at_the_top_but_the_package(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {PACKAGE}


def test_command_of_the_wheel_is_in_the_wheel(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
    assert f"lightning-afd = {PACKAGE}.recipes.cli:main" in text
    assert f"{PACKAGE}/recipes/cli.py" in files_in_wheel(built.wheel)


def test_installed_wheel_imports_without_the_checkout(built: Built, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target), str(built.wheel))
    checked(run_python(*pip, folder=elsewhere))
    program = (
        "import importlib, importlib.resources as resources;"
        "names = ['lightning_afd', 'lightning_afd.strategies', 'lightning_afd.recipes.cli'];"
        "[print(importlib.import_module(name).__file__) for name in names];"
        "print(resources.files('lightning_afd.conf') / 'config.yaml')"
    )
    places = [Path(line) for line in checked(run_python("-c", program, folder=elsewhere, path=target)).splitlines()]
    assert len(places) == 4
    assert all(place.is_file() and place.is_relative_to(target) for place in places), places


def test_bare_import_of_strategies_says_what_to_import() -> None:
    done = run_python("-c", "import strategies", folder=ROOT)
    assert done.returncode == 1
    assert "ImportError: " in done.stderr
    assert "import lightning_afd.strategies instead" in done.stderr


def test_file_comparison_finds_a_missing_configuration(built: Built, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled.whl"
    with zipfile.ZipFile(built.wheel) as source, zipfile.ZipFile(spoiled, "w") as copy:
        for name in source.namelist():
            if not name.endswith("conf/config.yaml"):
                copy.writestr(name, source.read(name))
    assert files_in_checkout() - files_in_wheel(spoiled) == {f"{PACKAGE}/conf/config.yaml"}
