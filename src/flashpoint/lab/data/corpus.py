"""Where text comes from. A source is a list of shards; a shard yields documents and can be pickled."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from flashpoint.errors import UserError, one_line
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data.packages import CODE, Packages, fetched
from flashpoint.lab.data.prose import PROSE
from flashpoint.lab.data.text_files import SHARD_BYTES, text_identity, text_shards

_CODE_SUFFIXES = frozenset((".py", ".pyi", ".pyx", ".pxd", ".txt", ".md", ".rst", ".c", ".cc", ".cpp", ".h", ".hpp"))
_LARGEST_CODE_FILE = 1_000_000  # beyond it files are tables and generated code
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_OPENWEBTEXT = "Skylion007/openwebtext"
OPENWEBTEXT_SHARD = 20_000
OF_PACKAGES: dict[str, Packages] = {packages.source: packages for packages in (CODE, PROSE)}
"""What pip fetches, by ``data.source``."""


class Shard(Protocol):
    """Part of a corpus that one process tokenises."""

    def documents(self) -> Iterator[str]:
        """Yield the shard's texts, always in the same order."""
        ...


def source_identity(config: DataConfig) -> dict[str, Any]:
    """Return what makes two preparations the same request, known without reading the text.

    For ``python_corpus`` what is installed is no part of it: what was prepared once stays, so that replays
    keep their data until the folder is deleted.

    Raises:
        UserError: ``data.path`` holds no text that can be read.
    """
    identity: dict[str, Any] = {"source": config.source, "max_bytes": config.max_bytes}
    if config.source in OF_PACKAGES:
        identity["packages"] = OF_PACKAGES[config.source].digest
    if config.source == "python_corpus":
        identity["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    if config.source == "text":
        identity |= text_identity(config)
    return identity


def source_shards(config: DataConfig) -> list[Shard]:
    """Return the corpus of ``config`` in shards, in a deterministic order.

    Raises:
        UserError: the source is missing, empty or unreachable.
    """
    match config.source:
        case "packages" | "prose":
            folder = fetched(OF_PACKAGES[config.source], Path(config.root))
            return list(_code_corpus([folder], config.max_bytes or sys.maxsize))
        case "python_corpus":
            return list(_code_corpus(_python_roots(), config.max_bytes or sys.maxsize))
        case "openwebtext":
            return list(_openwebtext(config.max_bytes))
        case "text":
            return list(text_shards(config))


@dataclass(frozen=True)
class CodeShard:
    """Source and text files, each one document, at most ``limits[i]`` bytes of file i."""

    paths: tuple[Path, ...]
    limits: tuple[int, ...]
    sha256: tuple[str, ...]
    """SHA-256 of each whole file at the time it was chosen."""

    def documents(self) -> Iterator[str]:
        """Yield each file's text. Raises ``UserError`` at a file that has changed since it was chosen."""
        for path, limit, sha256 in zip(self.paths, self.limits, self.sha256, strict=True):
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != sha256:
                raise UserError(f"{path}: changed while the corpus was prepared; run again, installing nothing")
            yield content[:limit].decode(errors="ignore")


@dataclass(frozen=True)
class OpenWebTextShard:
    """A range of OpenWebText's documents."""

    start: int
    stop: int

    def documents(self) -> Iterator[str]:
        for row in load_openwebtext().select(range(self.start, self.stop)):
            yield row["text"]


def _python_roots() -> list[Path]:
    return sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def _code_corpus(roots: list[Path], max_bytes: int) -> Iterator[CodeShard]:
    """Yield shards of files in the order of the hash of their names, which mixes packages; no text comes twice."""
    paths: list[Path] = []
    limits: list[int] = []
    digests: list[str] = []
    seen: set[str] = set()
    left = max_bytes
    for path in _code_files(roots):
        try:
            content = path.read_bytes()
            content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(content).hexdigest()
        if not content.strip() or digest in seen:
            continue
        seen.add(digest)
        paths.append(path)
        digests.append(digest)
        limits.append(min(len(content), left))
        left -= limits[-1]
        if sum(limits) >= SHARD_BYTES or left <= 0:
            yield CodeShard(tuple(paths), tuple(limits), tuple(digests))
            paths, limits, digests = [], [], []
        if left <= 0:
            return
    if paths:
        yield CodeShard(tuple(paths), tuple(limits), tuple(digests))


def _code_files(roots: list[Path]) -> list[Path]:
    named = []
    for root in roots:
        for name_of_folder, folders, files in os.walk(root):
            folder = Path(name_of_folder)
            # A root inside another is walked as a root of its own. In a virtual environment the standard library
            # is the base interpreter's, and the packages beside it are not installed here.
            skipped = ("__pycache__", *(_PACKAGE_FOLDERS if folder == root else ()))
            folders[:] = [name for name in folders if name not in skipped and folder / name not in roots]
            for path in filter(_is_code, (folder / name for name in files)):
                relative = path.relative_to(root).as_posix()
                named.append((hashlib.sha256(relative.encode()).digest(), str(path), path))
    return [path for *_, path in sorted(named)]


def _is_code(path: Path) -> bool:
    return path.suffix in _CODE_SUFFIXES and path.is_file() and path.stat().st_size <= _LARGEST_CODE_FILE


@lru_cache(maxsize=1)
def load_openwebtext() -> Any:
    """Return the ``datasets.Dataset`` with a ``text`` a row; loaded once in a process."""
    from datasets import load_dataset

    try:
        try:
            return load_dataset(_OPENWEBTEXT, split="train")
        except RuntimeError:
            # Its main branch may hold a loading script, which datasets ≥ 4 refuses to run; the hub keeps a conversion.
            return load_dataset(_OPENWEBTEXT, split="train", revision="refs/convert/parquet")
    except Exception as error:  # datasets raises its own, requests' and fsspec's
        raise UserError(
            f"data=openwebtext: cannot load {_OPENWEBTEXT} ({type(error).__name__}: {one_line(error)}); connect to the "
            "network, or take data=packages, data=python_corpus or data=text data.path=…"
        ) from error


def _openwebtext(max_bytes: int | None) -> Iterator[OpenWebTextShard]:
    dataset = load_openwebtext()
    count = len(dataset) if max_bytes is None else _documents_within(dataset, max_bytes)
    for start in range(0, count, OPENWEBTEXT_SHARD):
        yield OpenWebTextShard(start, min(start + OPENWEBTEXT_SHARD, count))


def _documents_within(dataset: Any, max_bytes: int) -> int:
    for index, row in enumerate(dataset):
        max_bytes -= len(row["text"].encode())
        if max_bytes <= 0:
            return index + 1
    return len(dataset)
