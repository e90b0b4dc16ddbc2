"""Files of lines that a run adds to: read whole, packed or not, without a line that a kill cut short."""

from __future__ import annotations

import lzma
from pathlib import Path

from flashpoint.errors import UserError


def packed(path: Path) -> Path:
    """Return where a file is compressed, as evidence keeps it: NAME.xz beside it."""
    return path.with_name(f"{path.name}.xz")


def as_kept(path: Path) -> Path:
    """Return the compressed file where there is one, else the path."""
    return packed(path) if packed(path).exists() else path


def whole_lines(path: Path, missing: str) -> list[bytes]:
    """Return the lines of a file, compressed by xz if its name says so, but for a last one without its end.

    Args:
        missing: what to do where the file cannot be read.

    Raises:
        UserError: it cannot be read, or its compression is damaged.
    """
    try:
        content = path.read_bytes()
        *lines, _unfinished = (_unpacked(content) if path.suffix == ".xz" else content).split(b"\n")
    except lzma.LZMAError as error:
        raise UserError(f"{path}: damaged ({error}); restore the file") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {missing}") from error
    return lines


def _unpacked(content: bytes) -> bytes:
    """Return what was compressed; unlike ``lzma.decompress`` it refuses what follows a whole stream, or is missing."""
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    found = unpacker.decompress(content)
    if not unpacker.eof or unpacker.unused_data:
        raise lzma.LZMAError("cut short" if not unpacker.eof else "more than one file")
    return found
