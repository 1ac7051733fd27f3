"""Hydra's and OmegaConf's errors as one sentence that names the setting and what could stand there."""

from collections.abc import Iterable, Iterator

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException


def sentence(error: BaseException) -> str:
    """Return one line for the user: which setting is wrong, and the choices where there are some."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={choice} is not a choice; {group} can be {_listed(error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not of the form key=value: {_one_line(error)}"
    for cause in _chain(error):
        if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
            return _unknown_key(cause)
    return _one_line(error)


def _unknown_key(error: OmegaConfBaseException) -> str:
    parent = error.parent_node
    keys = [key for key in map(str, parent) if not key.startswith("_") and key != "hydra"]
    if error.key in parent:  # the key exists, its value is what cannot be used
        return f"{error.full_key}: {_one_line(error)}"
    name = parent._get_full_key(None)
    return f"{error.full_key} is not a setting; {name or 'the config'} has {_listed(keys) or 'no settings'}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _listed(choices: Iterable[str]) -> str:
    return ", ".join(sorted(choices))


def _one_line(error: BaseException) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
