"""Files of lines that a run adds to: read whole, packed or not, without a line that a kill cut short."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from flashpoint.errors import UserError


def packed(path: Path) -> Path:
    """Return where a file is gzipped, as evidence keeps it: NAME.gz beside it."""
    return path.with_name(f"{path.name}.gz")


def as_kept(path: Path) -> Path:
    """Return the gzipped file where there is one, else the path."""
    return packed(path) if packed(path).exists() else path


def whole_lines(path: Path, missing: str) -> list[bytes]:
    """Return the lines of a file, gzipped if its name says so, but for a last one without its end.

    Args:
        missing: what to do where the file cannot be read.

    Raises:
        UserError: it cannot be read, or its compression is damaged.
    """
    try:
        content = path.read_bytes()
        *lines, _unfinished = (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}); restore the file") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {missing}") from error
    return lines
