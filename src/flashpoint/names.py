"""Names that become one folder: of runs and of sweeps."""

from __future__ import annotations

from flashpoint.errors import UserError

_RESERVED = {"reference": "holds the evidence tables"}
_LONGEST = 200  # bytes of UTF-8; most file systems take 255, and files beside the folder have longer names
_OF_SELECTIONS = "/\\:*?["
"""Characters by which RUN is more than a name: a path, a glob, or EXPERIMENT:PATTERN."""


def check_name(name: str, key: str) -> None:
    """Refuse what is not one new folder that every verb finds by its name.

    Raises:
        UserError: with ``key``, which gives the name.
    """
    told = f"{key}={name if name.isprintable() else repr(name)}"
    if name in _RESERVED:
        raise UserError(f"{told}: reserved, {name} {_RESERVED[name]}; choose another name")
    if not name.strip():
        raise UserError(f"{told}: an empty name; choose one")
    if found := next((character for character in _OF_SELECTIONS if character in name), None):
        raise UserError(f"{told}: a name cannot hold {found}, it is one folder under runs_dir; choose another")
    if name[0] in ".-~ " or name[-1] == " ":
        raise UserError(f"{told}: a name cannot begin with {name[0]!r} or end with a space; choose another")
    if not name.isprintable():
        raise UserError(f"{told}: a name cannot hold characters that do not print; choose another")
    if (size := len(name.encode())) > _LONGEST:
        raise UserError(f"{key}={name[:20]}…: a name of {size:,} bytes; give at most {_LONGEST}")
