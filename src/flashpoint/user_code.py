"""Code of the user's own, named as ``FILE.py:NAME``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError


def load(word: str, where: str) -> Any:
    """Run a Python file and return what it defines under a name.

    Args:
        word: ``FILE.py:NAME``.
        where: what the error begins with: the option or key and its value.

    Raises:
        UserError: there is no such file, it fails, or it does not define the name.
    """
    file, _, name = word.rpartition(":")
    if not Path(file).is_file():
        raise UserError(f"{where}: {file} is no file")
    spec = importlib.util.spec_from_file_location(f"flashpoint_user_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{where}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, name)
    except Exception as error:
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
