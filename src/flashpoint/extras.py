"""The one way from users' own runs up to the laboratory: by name, when somebody asks for what it does.

The laboratory (:mod:`flashpoint.lab`) imports this layer, never the other way round. Its packages may be missing: they
are those of the extra ``lab``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, requires
from typing import Any

from flashpoint.errors import UserError, pip_install


def from_lab(name: str, user: str) -> Any:
    """Return an attribute of the laboratory.

    Args:
        name: ``MODULE:ATTRIBUTE`` within :mod:`flashpoint.lab`.
        user: what needs it, in a user's words; messages begin with it.

    Raises:
        UserError: a package of the extra ``lab`` is not installed.
    """
    if lacking := missing("lab"):
        raise UserError(f"{user}: needs {', '.join(lacking)}; {pip_install('flashpoint[lab]')}")
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"flashpoint.lab.{module}"), attribute)


@lru_cache
def missing(extra: str) -> tuple[str, ...]:
    """Return the packages of an extra that are not installed; none where nobody knows, as of a source tree alone."""
    try:
        needed = requires("flashpoint") or []
    except PackageNotFoundError:
        return ()
    marked = re.compile(rf"([\w.-]+)[^;]*;.*\bextra\s*==\s*['\"]{extra}['\"]")
    named = [match[1] for requirement in needed if (match := marked.match(requirement))]
    return tuple(name for name in named if not _installed(name))


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
