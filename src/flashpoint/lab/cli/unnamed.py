"""What records of a run or YAML files say, and this command line does not: code to run, and where W&B is to upload.

Both may be somebody else's. They are taken as they are where ``trust=true`` stands on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from flashpoint.errors import UserError
from flashpoint.lab.config import Config

_SOURCES = ("replay", "resume")
_KEPT = ("offline", "disabled")
"""Options of the group ``tracking`` that upload nothing."""


def trusts(overrides: Sequence[Override]) -> bool:
    """Return whether a command line has ``trust=true``; that of a YAML file does not count."""
    return [one.value() for one in overrides if one.key_or_group == "trust"][-1:] == [True]


def refuse_unnamed(config: Config, overrides: Sequence[str]) -> None:
    """Refuse what this command line neither names nor trusts.

    Args:
        overrides: the command line's.

    Raises:
        UserError: with the file, or the key of W&B.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if trusts(parsed):
        return
    given = {one.key_or_group: one.value() for one in parsed}
    named = {text for key in ("probes", "probes.attention") for text in _texts(given.get(key))}
    source = next((f"{key}={given[key]}" for key in _SOURCES if key in given), "a YAML file")
    if unnamed := [word for word in config.own_code if word not in named]:
        told = f"names a file of code, {unnamed[0].rpartition(':')[0]}, and this command line does not"
        itself = f"'probes.attention=[{','.join(config.probes.attention)}]'"
        raise UserError(f"{source}: {told}; read it, then add trust=true, or {itself}")
    if config.tracking.wandb != "online":
        return
    keys = _keys(given)
    chosen = "tracking" in keys and given["tracking"] not in _KEPT  # a group's file of the user's own choice
    for key, value, is_named in (
        ("tracking.wandb", "online", chosen or "tracking.wandb" in keys),
        ("tracking.entity", config.tracking.entity, "tracking.entity" in keys),
    ):
        if value is not None and not is_named:
            raise UserError(f"{key}={value}: {source} says so, and this command line does not; add it, or trust=true")


def _texts(value: Any) -> Iterator[str]:
    """Return the texts in a value of an override."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inside in value:
            yield from _texts(inside)
    else:
        yield str(value)


def _keys(given: dict[str, Any]) -> set[str]:
    """Return the keys that are set, those inside of ``tracking={wandb: online}``, too."""
    inside = {f"{key}.{name}" for key, value in given.items() if isinstance(value, dict) for name in value}
    return {key for key, value in given.items() if not isinstance(value, dict)} | inside
