"""What W&B gets of a run's records: without the paths of this machine, which name people, projects and hosts."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

_OF_FILES = ("attention", "path", "probe", "replay", "resume", "root", "run", "runs_dir", "weights_against")
"""Keys whose texts are paths, also relative ones; what a run or a probe is called is their last part."""
_COMMAND = "command"
"""The key of the words of a command line, any of which may hold a path."""
_ABSOLUTE = re.compile(r"(?<![\w.:/~])(?:~|\.{1,2})?/[^\s'\",;:()\[\]{}]+")
"""A path in other text, as in an error of a probe; no address of the web, and no fraction."""


def without_paths(values: Any, key: str = "") -> Any:
    """Return plain values of records with the last part of each path alone, and without command lines.

    Args:
        key: under which they stand.
    """
    if isinstance(values, dict):
        return {name: without_paths(value, name) for name, value in values.items() if name != _COMMAND}
    if isinstance(values, list | tuple):
        return [without_paths(value, key) for value in values]
    if not isinstance(values, str):
        return values
    return PurePath(values).name if key in _OF_FILES else _ABSOLUTE.sub(lambda found: PurePath(found[0]).name, values)
