"""Commands of the guide: settings that there are, targets that there are, arguments that a launcher takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from doc_pages import GUIDE, ROOT, commands, inline_commands
from hydra import compose, initialize_config_module
from torch.distributed.run import get_args_parser

from lightning_afd.recipes.launch import quoted
from lightning_afd.recipes.ranks import check_ranks

CONFIGS = {"pretrain": "config", "plan": "plan", "report": "report", "export": "export", "bench": "bench"}
COMMANDS = sorted({command for page in GUIDE for command in (*commands(page), *inline_commands(page))})
PATHS = ("ckpt", "ckpt_path", "run", "out")


def settings(command: str) -> list[str]:
    """What a command of ours says, as Hydra's composition takes it."""
    _, _, *words = shlex.split(command)
    return [quoted(word, PATHS) for word in words if not word.startswith("-")]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("lightning-afd ")])
def test_settings_are_those_that_there_are(command: str) -> None:
    name = command.split()[1]
    if name == "survey":
        return
    with initialize_config_module(version_base="1.3", config_module="lightning_afd.conf"):
        for overrides in _runs(settings(command)):
            config = compose(
                CONFIGS[name], [*overrides, "output_dir=."] if name not in ("report", "export") else overrides
            )
            if name == "pretrain":
                check_ranks(config)


def _runs(overrides: list[str]) -> list[list[str]]:
    """A sweep's runs: the first and the last value of each setting with several."""
    several = re.compile(r"=([^\[{',]+)(?:,[^\[{',]+)*?,([^\[{',]+)$")
    return [[several.sub(rf"=\{which}", override) for override in overrides] for which in (1, 2)]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_targets_are_those_of_the_makefile(command: str) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert shlex.split(command)[1] in targets


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("torchrun --")])
def test_launchers_take_the_arguments(command: str) -> None:
    options = get_args_parser().parse_args(shlex.split(command.replace("$NODE", "1"))[1:])
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "2", 1)


def test_all_kinds_of_commands_are_known() -> None:
    known = ("lightning-afd ", "make ", "torchrun ", "pip install ", "python ")
    assert not [command for command in COMMANDS if not command.startswith(known)]
    extras = set(re.findall(r"\.\[(\w+)\]", "\n".join(COMMANDS)))
    assert extras <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def test_a_wrong_setting_would_be_found() -> None:
    with pytest.raises(Exception, match="tokens"):
        test_settings_are_those_that_there_are("lightning-afd plan data.tokens=3")


def test_scripts_are_there() -> None:
    for command in COMMANDS:
        if command.startswith("python "):
            assert Path(ROOT, command.split()[1]).is_file()
