"""``flashpoint train help=all``: every key with its value, what it takes and what it means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click
import yaml
from omegaconf import DictConfig, OmegaConf

from flashpoint.lab.build_config import FREE_KEYS, key_types, keys

_MARKUP = re.compile(r":\w+:(?=`)|`")


def print_keys(composed: DictConfig) -> None:
    """Print the keys, a section after the other, with the values that the command line composes."""
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
