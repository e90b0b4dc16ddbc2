"""Files that are whole or not there: JSON written atomically, digests of bytes, and where the package's own lie."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
CONFIGS = next(filter(Path.is_dir, (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")))
"""Hydra's YAML files: in a wheel inside the package, in a checkout at the top level."""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha256(folder: Path) -> str:
    """Return the hex digest of the names and bytes of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    told = [f"{path.relative_to(folder)} {file_sha256(path)}" for path in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
