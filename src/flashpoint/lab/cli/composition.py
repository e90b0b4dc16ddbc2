"""The configuration of a run as Hydra composes it: in ``flashpoint train`` and, by its Compose API, elsewhere."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import click
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from flashpoint.files import CONFIGS
from flashpoint.lab.build_config import FREE_KEYS, hydra_schema, key_types, keys

CONFIG = "train"
"""The configuration of a run, ``configs/train.yaml``."""
VERSION = "1.3"
"""Of Hydra's behaviour."""
_MARKUP = re.compile(r":\w+:(?=`)|`")


@functools.cache
def store_schema() -> None:
    """Give Hydra every key of a run with its type and default."""
    ConfigStore.instance().store(name="schema", node=hydra_schema())


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what overrides compose as plain values: those of ``Config``, and ``hardware`` and ``help``.

    Raises:
        Exception: Hydra refuses an override (:func:`flashpoint.lab.cli.refusals.refusal`).
    """
    store_schema()
    with initialize_config_dir(str(Path(CONFIGS).resolve()), version_base=VERSION):
        return cast(dict[str, Any], OmegaConf.to_container(compose(CONFIG, list(overrides)), resolve=True))


def print_keys(composed: DictConfig) -> None:
    """Print every key for ``help=all``: its value, what it takes and what it means, a section after the other,
    with the values that the command line composes."""
    described = {key.name: _MARKUP.sub("", key.description) for key in keys()}
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, value in _leaves(OmegaConf.to_container(composed, resolve=False)):
        meaning = f"{described.get(key, '')} ({key_types()[key]})".strip()
        sections.setdefault(key.rpartition(".")[0].partition(".")[0], []).append((f"{key}={value}", meaning))
    formatter = click.HelpFormatter(max_width=120)
    for section, lines in sections.items():
        with formatter.section(section or "The run"):
            formatter.write_dl(lines, col_max=44)
    print(formatter.getvalue(), end="")


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in FREE_KEYS:
            yield from _leaves(value, f"{key}.")
        elif key != "help":
            yield key, yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000).split("\n")[0]
