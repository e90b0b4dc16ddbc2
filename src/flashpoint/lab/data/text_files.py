"""Text files of the user's own: which they are, and the documents in them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError, one_line
from flashpoint.lab.config import DataConfig

_SUFFIXES = frozenset((".txt", ".jsonl", ".parquet"))


def text_identity(config: DataConfig) -> dict[str, Any]:
    """Return what tells two states of the files apart, known without reading them.

    Raises:
        UserError: ``data.path`` holds no text that can be read.
    """
    try:
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(config)]
    except OSError as error:
        raise _unreadable(error) from error
    return {"files": files, "text_field": config.text_field}


def text_shards(config: DataConfig) -> Iterator[TextShard]:
    """Yield the files in the order of their names, up to ``data.max_bytes`` of text.

    Raises:
        UserError: as :func:`text_identity`; with ``data.max_bytes`` also of a file that cannot be read.
    """
    left = config.max_bytes
    for path in _files(config):
        yield TextShard(path, config.text_field, left)
        if left is not None:
            left -= sum(len(text.encode()) for text in TextShard(path, config.text_field, left).documents())
            if left <= 0:
                return


@dataclass(frozen=True)
class TextShard:
    """One of the user's files, at most ``max_bytes`` of its text."""

    path: Path
    field: str
    max_bytes: int | None

    def documents(self) -> Iterator[str]:
        """Yield each document. Raises ``UserError`` with the file, and the line, that cannot be read."""
        left = self.max_bytes if self.max_bytes is not None else sys.maxsize
        try:
            for document in self._all_documents():
                encoded = document.encode()
                text = encoded[:left].decode(errors="ignore")
                left -= len(encoded)
                if text:
                    yield text
                if left <= 0:
                    return
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or one_line(error)}; make it readable or move it") from error

    def _all_documents(self) -> Iterator[str]:
        # utf-8-sig: Windows marks a file's beginning.
        match self.path.suffix:
            case ".txt":
                try:
                    yield self.path.read_text(encoding="utf-8-sig")
                except UnicodeDecodeError as error:
                    raise UserError(f"{self.path}: no UTF-8 at byte {error.start:,}; convert the file") from error
            case ".jsonl":
                with self.path.open("rb") as file:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield self._record_text(line, number)
            case _:
                yield from self._parquet()

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


def _files(config: DataConfig) -> list[Path]:
    root = Path(config.path or "").absolute()
    if root.is_file() and root.suffix not in _SUFFIXES:
        raise UserError(f"data.path={config.path}: {root.suffix or 'no'} suffix; give .txt, .jsonl or .parquet")
    files = [root] if root.is_file() else sorted(_files_below(root))
    if not files:
        raise UserError(f"data.path={config.path}: no .txt, .jsonl or .parquet file in it; give a folder of them")
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: no file, or a link to none; mend or delete it")
    return files


def _files_below(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(error) from error

    for folder, _, names in os.walk(root, onerror=refuse):
        yield from (Path(folder) / name for name in names if Path(name).suffix in _SUFFIXES)


def _unreadable(error: OSError) -> UserError:
    return UserError(f"data.path={error.filename}: {error.strerror}; give a file or folder that can be read")
