"""A run's configuration from composed values, the schema that Hydra composes them by, and the list of its keys."""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from flashpoint.detector import DetectorConfig
from flashpoint.errors import UserError
from flashpoint.files import CONFIGS
from flashpoint.lab.config import (
    CheckpointsConfig,
    Config,
    DataConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    ProbesConfig,
    TrackingConfig,
    TrainConfig,
)
from flashpoint.numerics.named import resolved
from flashpoint.typed import Key, in_one_line, keys_of, require_text, structured_config, type_name

_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "detector": DetectorConfig,
    "probes": ProbesConfig,
    "checkpoints": CheckpointsConfig,
    "tracking": TrackingConfig,
}
_GROUP = "keys of its own, each set by itself"
FREE_KEYS = frozenset(["attn.elsewhere"])
"""Keys whose value may have keys of its own, a whole variant's."""


def keys() -> Iterator[Key]:
    """Return every key but those of ``attn``, in the order of their fields; a section that has a mark is one of
    them."""
    yield from keys_of(Config)
    for name, section in {**_SECTIONS, "hardware": HardwareConfig}.items():
        yield from keys_of(section, f"{name}.")


@functools.cache
def key_types() -> dict[str, str]:
    """Return what each group and key of ``flashpoint train`` takes, in words."""
    beside = {"experiment": "name of an experiment", "help": "all", "hardware": _GROUP}
    free = dict.fromkeys(FREE_KEYS, "name of an attention, or its keys, or null")
    return {**beside, **_types_of(HardwareConfig, "hardware."), **_types_of(Config), **free}


def _types_of(section: type, prefix: str = "") -> dict[str, str]:
    hints, found = typing.get_type_hints(section), dict[str, str]()
    for name in (one.name for one in dataclasses.fields(section) if one.init):
        key, hint = f"{prefix}{name}", hints[name]
        nested = _types_of(cast(type, hint), f"{key}.") if dataclasses.is_dataclass(hint) else {}
        found |= {key: _GROUP if nested else type_name(hint), **nested}
    return found


@functools.cache
def hydra_schema() -> type:
    """Return what Hydra composes as a structured config: it refuses unknown keys and wrong types by name.

    It is :class:`Config`, and beside it what is no part of a run: ``hardware`` and ``help``.
    """
    hardware = structured_config(HardwareConfig)
    beside = [("hardware", hardware, field(default_factory=hardware)), ("help", str | None, None)]
    return dataclasses.make_dataclass("Composed", beside, bases=(structured_config(Config),))


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of some keys, ``train.steps``; a whole section is a key, too.

    Raises:
        UserError: as of :func:`build_config`.
    """
    values = config.to_dict()
    for key, value in changes.items():
        put(values, key, value)
    return build_config(values, CONFIGS / "attn")


def value_at(values: dict[str, Any], key: str) -> Any:
    """Return what composed values have at a dotted key."""
    return functools.reduce(operator.getitem, key.split("."), values)


def put(values: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key of composed values."""
    section, _, last = key.rpartition(".")
    (value_at(values, section) if section else values)[last] = value


def build_config(values: dict[str, Any], variants_dir: Path) -> Config:
    """Validate composed values.

    Args:
        values: plain containers, the shape of ``Config``; ``attn.elsewhere`` may be a variant's name.
        variants_dir: the ``attn`` group's folder, where such a name is looked up.

    Raises:
        UserError: naming the field and the remedy.
    """
    require_text(values)
    for name in ("attn", *_SECTIONS):
        if not isinstance(values.get(name), dict):
            raise UserError(f"{name}={values.get(name)}: a group of keys, each to be set by itself")
    values = dict(values)
    elsewhere = values["attn"].get("elsewhere")
    if not isinstance(elsewhere, str | dict | None):
        raise UserError(f"attn.elsewhere={elsewhere}: no variant; give a name, e.g. attn.elsewhere=flash_fp32")
    where, cls = "", cast(type, Config)
    try:
        values["attn"] = resolved(values["attn"], variants_dir)
        for name, section in _SECTIONS.items():
            where, cls = f"{name}.", section
            values[name] = section(**values[name])
        where, cls = "", Config
        return Config(**values)
    except ValidationError as error:
        raise UserError(in_one_line(error, cls, where)) from error
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
