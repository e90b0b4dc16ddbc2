"""Where text comes from. A source is a list of shards; a shard yields documents and can be pickled."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from flashpoint.config import DataConfig
from flashpoint.errors import UserError

SHARD_BYTES = 4_000_000
_CODE_SUFFIXES = frozenset((".py", ".pyi", ".pyx", ".pxd", ".txt", ".md", ".rst", ".c", ".cc", ".cpp", ".h", ".hpp"))
_LARGEST_CODE_FILE = 1_000_000  # beyond it files are tables and generated code
_TEXT_SUFFIXES = frozenset((".txt", ".jsonl", ".parquet"))
_OPENWEBTEXT = "Skylion007/openwebtext"
_OPENWEBTEXT_SHARD = 20_000


class Shard(Protocol):
    """Part of a corpus that one process tokenises."""

    def documents(self) -> Iterator[str]:
        """Its texts, always in the same order."""
        ...


def source_identity(config: DataConfig) -> dict[str, Any]:
    """What makes two preparations the same request, known without reading the text.

    For ``python_corpus`` the installed packages are no part of it: what was prepared once stays, so that replays
    keep their data until the folder is deleted.
    """
    identity: dict[str, Any] = {"source": config.source, "max_bytes": config.max_bytes}
    if config.source == "python_corpus":
        identity["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    if config.source == "text":
        root = _text_root(config)
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _text_files(root)]
        identity |= {"files": files, "text_field": config.text_field}
    return identity


def source_shards(config: DataConfig) -> list[Shard]:
    """The corpus of ``config`` in shards, in a deterministic order.

    Raises:
        UserError: the source is missing, empty or unreachable.
    """
    match config.source:
        case "python_corpus":
            return list(_python_corpus(_python_roots(), config.max_bytes or sys.maxsize))
        case "openwebtext":
            return list(_openwebtext(config.max_bytes))
        case "text":
            return list(_text_shards(_text_files(_text_root(config)), config))


@dataclass(frozen=True)
class CodeShard:
    """Source and text files, each one document, at most ``limits[i]`` bytes of file i."""

    paths: tuple[Path, ...]
    limits: tuple[int, ...]

    def documents(self) -> Iterator[str]:
        for path, limit in zip(self.paths, self.limits, strict=True):
            yield path.read_bytes()[:limit].decode(errors="ignore")


@dataclass(frozen=True)
class OpenWebTextShard:
    """A range of OpenWebText's documents."""

    start: int
    stop: int

    def documents(self) -> Iterator[str]:
        for row in _load_openwebtext().select(range(self.start, self.stop)):
            yield row["text"]


@dataclass(frozen=True)
class TextShard:
    """One of the user's files, at most ``max_bytes`` of its text."""

    path: Path
    field: str
    max_bytes: int | None

    def documents(self) -> Iterator[str]:
        left = self.max_bytes if self.max_bytes is not None else sys.maxsize
        for document in self._all_documents():
            text = document.encode()[:left].decode(errors="ignore")
            left -= len(document.encode())
            if text:
                yield text
            if left <= 0:
                return

    def _all_documents(self) -> Iterator[str]:
        match self.path.suffix:
            case ".txt":
                try:
                    yield self.path.read_text(encoding="utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(f"{self.path}: no UTF-8 at byte {error.start:,}; convert the file") from error
            case ".jsonl":
                yield from self._jsonl()
            case _:
                yield from self._parquet()

    def _jsonl(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8", errors="strict") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[self.field]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"{self.path}:{number}: no JSON object with a field {self.field!r}; "
                        "mend the line or set data.text_field"
                    ) from error
                if not isinstance(text, str):
                    raise UserError(f"{self.path}:{number}: {self.field!r} holds no text; set data.text_field")
                yield text

    def _parquet(self) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(self.path)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path}: no parquet file ({str(error).splitlines()[0]}); restore it") from error
        if self.field not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise UserError(f"{self.path}: no column {self.field!r} among {columns}; set data.text_field")
        for batch in table.iter_batches(columns=[self.field]):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise UserError(f"{self.path}: column {self.field!r} holds no text; set data.text_field")
                yield text or ""


def _python_roots() -> list[Path]:
    return sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def _python_corpus(roots: list[Path], max_bytes: int) -> Iterator[CodeShard]:
    """Files in the order of the hash of their names, which mixes packages and needs no reading; no text twice."""
    paths: list[Path] = []
    limits: list[int] = []
    seen: set[bytes] = set()
    left = max_bytes
    for path in _code_files(roots):
        try:
            content = path.read_bytes()
            content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(content).digest()
        if not content.strip() or digest in seen:
            continue
        seen.add(digest)
        paths.append(path)
        limits.append(min(len(content), left))
        left -= limits[-1]
        if sum(limits) >= SHARD_BYTES or left <= 0:
            yield CodeShard(tuple(paths), tuple(limits))
            paths, limits = [], []
        if left <= 0:
            return
    if paths:
        yield CodeShard(tuple(paths), tuple(limits))


def _code_files(roots: list[Path]) -> list[Path]:
    named = []
    for root in roots:
        for name_of_folder, folders, files in os.walk(root):
            folder = Path(name_of_folder)
            # A root inside another is walked as a root of its own.
            folders[:] = [name for name in folders if name != "__pycache__" and folder / name not in roots]
            for name in files:
                path = folder / name
                if path.suffix in _CODE_SUFFIXES and path.is_file() and path.stat().st_size <= _LARGEST_CODE_FILE:
                    relative = path.relative_to(root).as_posix()
                    named.append((hashlib.sha256(relative.encode()).digest(), str(path), path))
    return [path for *_, path in sorted(named)]


@lru_cache(maxsize=1)
def _load_openwebtext() -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(_OPENWEBTEXT, split="train")
    except RuntimeError:
        # Its main branch may hold a loading script, which datasets ≥ 4 refuses to run; the hub keeps a conversion.
        return load_dataset(_OPENWEBTEXT, split="train", revision="refs/convert/parquet")


def _openwebtext(max_bytes: int | None) -> Iterator[OpenWebTextShard]:
    try:
        dataset = _load_openwebtext()
    except Exception as error:  # datasets raises its own, requests' and fsspec's
        raise UserError(
            f"data=openwebtext: cannot load {_OPENWEBTEXT} ({type(error).__name__}); connect to the network, "
            "or take data=python_corpus or data=text data.path=…"
        ) from error
    count = len(dataset)
    if max_bytes is not None:
        count = _documents_within(dataset, max_bytes)
    for start in range(0, count, _OPENWEBTEXT_SHARD):
        yield OpenWebTextShard(start, min(start + _OPENWEBTEXT_SHARD, count))


def _documents_within(dataset: Any, max_bytes: int) -> int:
    for index, row in enumerate(dataset):
        max_bytes -= len(row["text"].encode())
        if max_bytes <= 0:
            return index + 1
    return len(dataset)


def _text_shards(files: list[Path], config: DataConfig) -> Iterator[TextShard]:
    left = config.max_bytes
    for path in files:
        yield TextShard(path, config.text_field, left)
        if left is not None:
            left -= sum(len(text.encode()) for text in TextShard(path, config.text_field, left).documents())
            if left <= 0:
                return


def _text_root(config: DataConfig) -> Path:
    root = Path(config.path or "").absolute()
    if not root.exists():
        raise UserError(f"data.path={config.path}: no such file or folder")
    if root.is_file() and root.suffix not in _TEXT_SUFFIXES:
        raise UserError(f"data.path={config.path}: {root.suffix or 'no'} suffix; give .txt, .jsonl or .parquet")
    return root


def _text_files(root: Path) -> list[Path]:
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in _TEXT_SUFFIXES)
    if not files:
        raise UserError(f"data.path={root}: no .txt, .jsonl or .parquet file in it")
    return files
