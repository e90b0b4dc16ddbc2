"""What Hydra composes from the repository's configuration, in this process."""

import copy
import functools
import re
from typing import Any

from flashpoint.lab.build_config import build_config
from flashpoint.lab.cli import composition
from flashpoint.lab.config import Config
from tests.conftest import REPOSITORY

CONFIGS = REPOSITORY / "configs"
_TEXT = re.compile(
    r"^(data\.path|data\.root|runs_dir|run_name|replay|resume)=(/[\w./-]+|(?!null$|true$|false$)[a-z]{4,})$"
)
"""Overrides that differ from test to test, and whose values Hydra takes as they stand: all others are composed once."""


def composed(*overrides: str) -> Config:
    return build_config(composed_values(*overrides), CONFIGS / "attn")


def composed_values(*overrides: str) -> dict[str, Any]:
    """Plain values of the shape of ``Config``."""
    texts = [match.groups() for override in overrides if (match := _TEXT.search(override))]
    values = copy.deepcopy(_composed(*(_TEXT.sub(r"\1=text", override) for override in overrides)))
    del values["hardware"], values["help"]
    for key, text in texts:
        *sections, name = key.split(".")
        functools.reduce(dict.__getitem__, sections, values)[name] = text
    return values


def composed_hardware(*overrides: str) -> dict[str, Any]:
    """Plain values of the shape of ``HardwareConfig``."""
    return copy.deepcopy(dict(_composed(*overrides)["hardware"]))


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    """The files of the configuration do not change while tests run; a composition takes a fifth of a second."""
    return composition.composed_values(overrides)
