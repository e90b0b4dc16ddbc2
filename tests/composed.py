"""What Hydra composes from the repository's configuration, in this process."""

import copy
import functools
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashpoint.lab.build_config import build_config, key_types
from flashpoint.lab.cli import composition
from flashpoint.lab.config import Config
from tests import composition_once
from tests.conftest import REPOSITORY

CONFIGS = REPOSITORY / "configs"
composition_once.work_once()


def composed(*overrides: str) -> Config:
    return build_config(composed_values(*overrides), CONFIGS / "attn")


def composed_values(*overrides: str) -> dict[str, Any]:
    """Plain values of the shape of ``Config``."""
    values = copy.deepcopy(_composed(*overrides))
    del values["hardware"], values["help"]
    return values


def configured(*overrides: str) -> Config:
    """What :func:`composed` returns, where nobody asks of Hydra: ten times faster."""
    return build_config(configured_values(*overrides), CONFIGS / "attn")


def configured_values(*overrides: str) -> dict[str, Any]:
    """What :func:`composed_values` returns: Hydra composes the groups once, and values are put into a copy as by it."""
    parsed = [_parsed(override) for override in overrides]
    of_keys = [one for one in parsed if one.type == OverrideType.CHANGE and one.key_or_group in _keys()]
    if any(map(Override.is_sweep_override, of_keys)):
        return composed_values(*overrides)
    values = copy.deepcopy(_groups(*(one.input_line for one in parsed if one not in of_keys)))
    try:
        for one in of_keys:
            OmegaConf.update(values, one.key_or_group, one.value(), merge=True)
    except OmegaConfBaseException:
        return composed_values(*overrides)  # which refuses it in Hydra's words
    plain: dict[str, Any] = OmegaConf.to_container(values, resolve=True)  # type: ignore[assignment]
    del plain["hardware"], plain["help"]
    return plain


@functools.cache
def _parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


@functools.cache
def _keys() -> set[str]:
    return {key for key in key_types() if key != "help" and not (CONFIGS / key).is_dir()}


@functools.cache
def _groups(*overrides: str | None) -> DictConfig:
    composition.store_schema()
    with initialize_config_dir(str(CONFIGS.resolve()), version_base=composition.VERSION):
        return compose(composition.CONFIG, [override for override in overrides if override])


def composed_hardware(*overrides: str) -> dict[str, Any]:
    """Plain values of the shape of ``HardwareConfig``."""
    return copy.deepcopy(dict(_composed(*overrides)["hardware"]))


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    """The files of the configuration do not change while tests run; a composition takes a fifth of a second."""
    return composition.composed_values(overrides)
