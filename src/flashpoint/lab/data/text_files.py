"""Text files of the user's own: which they are, and the documents in them."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError, one_line
from flashpoint.lab.config import DataConfig

_SUFFIXES = frozenset((".txt", ".jsonl", ".parquet"))
SHARD_BYTES = 4_000_000
"""Of small files that are tokenised together, at most: a shard costs a process a file, a record and two waits."""
_SHARDS = 64
"""Into which few or small files are not taken together: every core has work, and little is lost where one fails."""


def text_identity(config: DataConfig) -> dict[str, Any]:
    """Return what tells two states of the files apart, known without reading them.

    Raises:
        UserError: ``data.path`` holds no text that can be read.
    """
    try:
        files = [(str(path), status.st_size, status.st_mtime_ns) for path, status in _files(config)]
    except OSError as error:
        raise _unreadable(error) from error
    return {"files": files, "text_field": config.text_field}


def text_shards(config: DataConfig) -> Iterator[TextShard]:
    """Yield the files in the order of their names, up to ``data.max_bytes`` of text; small ones together.

    Raises:
        UserError: as :func:`text_identity`; with ``data.max_bytes`` also of a file that cannot be read.
    """
    files, left = _files(config), config.max_bytes
    together = min(SHARD_BYTES, sum(status.st_size for _, status in files) // _SHARDS)
    for paths in _together(files, together):
        shard = TextShard(paths, config.text_field, left)
        yield shard
        if left is not None:
            left -= sum(_bytes_of(text) for text in shard.documents())
            if left <= 0:
                return


def _together(files: Iterable[tuple[Path, os.stat_result]], most_bytes: int) -> Iterator[tuple[Path, ...]]:
    """Yield the files in their order: each alone, or as many as have no more bytes together."""
    paths: list[Path] = []
    size = 0
    for path, status in files:
        if paths and size + status.st_size > most_bytes:
            yield tuple(paths)
            paths, size = [], 0
        paths.append(path)
        size += status.st_size
    yield tuple(paths)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True)
class TextShard:
    """Some of the user's files, at most ``max_bytes`` of their text."""

    paths: tuple[Path, ...]
    field: str
    max_bytes: int | None

    def documents(self) -> Iterator[str]:
        """Yield each document. Raises ``UserError`` with the file, and the line, that cannot be read."""
        left = self.max_bytes
        for path in self.paths:
            for text in _TextFile(path, self.field, left).documents():
                yield text
                if left is not None:
                    left -= _bytes_of(text)
            if left is not None and left <= 0:
                return


@dataclass(frozen=True)
class _TextFile:
    """One of the user's files, at most ``max_bytes`` of its text."""

    path: Path
    field: str
    max_bytes: int | None

    def documents(self) -> Iterator[str]:
        """Yield each document; no more is read than has so many bytes."""
        left = self.max_bytes
        try:
            for document in self._all_documents():
                size = _bytes_of(document)
                text = document if left is None or size <= left else document.encode()[:left].decode(errors="ignore")
                if text:
                    yield text
                if left is not None:
                    left -= size
                    if left <= 0:
                        return
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or one_line(error)}; make it readable or move it") from error

    def _all_documents(self) -> Iterator[str]:
        match self.path.suffix:
            case ".txt":
                yield self._plain()
            case ".jsonl":
                with self.path.open("rb") as file:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield self._record_text(line, number)
            case _:
                yield from self._parquet()

    def _plain(self) -> str:
        """Return the text of a file, of a long one no less than ``max_bytes``."""
        # utf-8-sig: Windows marks a file's beginning. It also ends a line with two bytes, which become one.
        most = -1
        if self.max_bytes is not None:  # Python allocates as many bytes as it is asked for
            most = min(self.path.stat().st_size, 2 * self.max_bytes + len(codecs.BOM_UTF8))
        with self.path.open("rb") as file:
            content = file.read(most)
            whole = not file.read(1)
        try:
            text = codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=whole)
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: no UTF-8 at byte {error.start:,}; convert the file") from error
        return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text

    def _record_text(self, line: bytes, number: int) -> str:
        try:
            text = json.loads(line.decode("utf-8-sig"))[self.field]
            if isinstance(text, str):
                text.encode()  # JSON can spell half of a surrogate pair, which is no character
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            raise UserError(f"{self.path}:{number}: no UTF-8 text ({error.reason}); mend the line") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self.path}:{number}: no JSON object with a field {self.field!r}; "
                "mend the line or set data.text_field"
            ) from error
        if not isinstance(text, str):
            raise UserError(f"{self.path}:{number}: {self.field!r} holds no text; set data.text_field")
        return text

    def _parquet(self) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(self.path)
            if self.field not in table.schema_arrow.names:
                columns = ", ".join(table.schema_arrow.names)
                raise UserError(f"{self.path}: no column {self.field!r} among {columns}; set data.text_field")
            for batch in table.iter_batches(columns=[self.field]):
                for text in batch.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise UserError(f"{self.path}: column {self.field!r} holds no text; set data.text_field")
                    yield text or ""
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path}: no parquet file or a damaged one ({one_line(error)}); restore it") from error


def _files(config: DataConfig) -> list[tuple[Path, os.stat_result]]:
    """Return the files in the order of their names."""
    root = Path(config.path or "").absolute()
    if root.is_file():
        if root.suffix not in _SUFFIXES:
            raise UserError(f"data.path={config.path}: {root.suffix or 'no'} suffix; give .txt, .jsonl or .parquet")
        return [(root, root.stat())]
    files = [(path, path.stat() if path.is_file() else None) for path in sorted(_files_below(root))]
    if not files:
        raise UserError(f"data.path={config.path}: no .txt, .jsonl or .parquet file in it; give a folder of them")
    return [(path, _there(path, status)) for path, status in files]


def _there(path: Path, status: os.stat_result | None) -> os.stat_result:
    if status is None:
        raise UserError(f"{path}: no file, or a link to none; mend or delete it")
    return status


def _files_below(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(error) from error

    for folder, _, names in os.walk(root, onerror=refuse):
        yield from (Path(folder) / name for name in names if Path(name).suffix in _SUFFIXES)


def _unreadable(error: OSError) -> UserError:
    return UserError(f"data.path={error.filename}: {error.strerror}; give a file or folder that can be read")
