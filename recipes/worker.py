"""One rank of one job: `python -m lightning_afd.recipes.worker <recipe> <output directory>/config.yaml`."""

import sys

from omegaconf import DictConfig, OmegaConf

from lightning_afd.recipes.launch import work
from lightning_afd.recipes.reader import ending_with_its_reader


def main() -> None:
    """Run the job whose finished config the command line names."""
    recipe, file = sys.argv[1:]
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    with ending_with_its_reader():
        work(recipe, config)


if __name__ == "__main__":
    main()
