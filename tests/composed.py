"""What Hydra composes from the repository's configuration, in this process."""

import copy
import functools
from typing import Any

from flashpoint.lab.build_config import build_config
from flashpoint.lab.cli import composition
from flashpoint.lab.config import Config
from tests.conftest import REPOSITORY

CONFIGS = REPOSITORY / "configs"


def composed(*overrides: str) -> Config:
    return build_config(composed_values(*overrides), CONFIGS / "attn")


def composed_values(*overrides: str) -> dict[str, Any]:
    """Plain values of the shape of ``Config``."""
    values = copy.deepcopy(_composed(*overrides))
    del values["hardware"], values["help"]
    return values


def composed_hardware(*overrides: str) -> dict[str, Any]:
    """Plain values of the shape of ``HardwareConfig``."""
    return copy.deepcopy(dict(_composed(*overrides)["hardware"]))


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    """The files of the configuration do not change while tests run; a composition takes a fifth of a second."""
    return composition.composed_values(overrides)
