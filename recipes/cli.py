"""The command `lightning-afd <recipe> [settings]`."""

import importlib
import sys

from lightning_afd.recipes.launch import RECIPES
from lightning_afd.recipes.reader import ending_with_its_reader

TOOLS = {name: f"lightning_afd.recipes.{name}" for name in ("bench", "export", "plan", "report", "survey")}
"""Commands that start no job: a name and its module, which has `main()`."""


def main() -> None:
    """Run the recipe that the command line names; an unknown one ends with a sentence and exit code 1."""
    with ending_with_its_reader():
        _run()


def _run() -> None:
    commands = RECIPES | TOOLS
    names = ", ".join(sorted(commands))
    usage = f"usage: lightning-afd <recipe> [settings]; <recipe> --help lists its settings; recipes: {names}\n"
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(usage)
        return
    if name not in commands:
        sys.stderr.write(f"lightning-afd: {name} is not a recipe; choices: {names}\n")
        sys.exit(1)
    del sys.argv[1]
    importlib.import_module(commands[name]).main()


if __name__ == "__main__":
    main()
