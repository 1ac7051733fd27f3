"""`lightning-afd report`, and the page that the default recipe leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from reports import run_folder

from lightning_afd.recipes import cli
from lightning_afd.recipes.pretrain import report_line


def command(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["lightning-afd", "report", *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    cli.main()


def test_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lr=1e-3").mkdir()
    run_folder(tmp_path / "lr=1e-3")
    command(monkeypatch, tmp_path, "run=lr=1e-3", "step=30", "out=page.html")
    size = (tmp_path / "page.html").stat().st_size
    assert capsys.readouterr().out == f"page.html ({size / 1e3:,.0f} kB)\n"
    assert "step 30" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "run must be given: run=..."),
        (
            ("run=.",),
            ". has no recorded steps (trace/step-*.json): train with AFDStrategy(trace=50), or strategy.trace=50",
        ),
        (("rum=.",), "rum is not a setting; the config has out, run, step"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit, match="1"):
        command(monkeypatch, tmp_path, *arguments)
    error = capsys.readouterr().err
    assert error.startswith(f"lightning-afd: {message}") and error.count("\n") == 1


def test_help_says_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, tmp_path, "--help")
    assert capsys.readouterr().out.startswith("lightning-afd report run=<folder>")


def test_recipe_leaves_a_report_where_steps_were_recorded(tmp_path: Path) -> None:
    assert report_line(str(tmp_path)) == []
    (line,) = report_line(str(run_folder(tmp_path)))
    assert line.startswith(f"report   {tmp_path / 'report.html'} (")


def test_recipe_ends_well_although_the_report_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path)
    (run / "logs" / "trace" / "step-00000010.json").write_text("{")
    (line,) = report_line(str(run))
    assert line.startswith("report   not written: ") and "step-00000010.json is no complete recording" in line
    monkeypatch.setattr("lightning_afd.report.write_report", lambda run: 1 / 0)
    assert report_line(str(run)) == ["report   not written: division by zero"]
