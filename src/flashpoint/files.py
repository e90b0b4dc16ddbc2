"""Files that are whole or not there, lines that a kill may have cut short, digests of bytes, and where ours lie."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import lzma
import mmap
import os
import re
import shutil
import stat
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from flashpoint.errors import UserError

_PACKAGE = Path(__file__).parent
CONFIGS = next(filter(Path.is_dir, (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")))
"""Hydra's YAML files: in a wheel inside the package, in a checkout at the top level."""

_LARGEST_MB = 64
"""Of what a compressed file holds. A run that is kept as evidence has less than 1 MB in one."""
_CHUNK = 2**20


def regular(path: Path) -> Path:
    """Return a path that is about to be opened. What is no file is refused: a pipe may never end.

    Raises:
        OSError: there is a pipe, a socket or a device, or nothing. A folder the system itself refuses to open.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe, socket or device, and no file", str(path))
    return path


def content(path: Path, most_mb: int = _LARGEST_MB) -> bytes:
    """Return the bytes of a file of somebody else's, or of a record: what is no file or too large is not begun.

    Raises:
        OSError: it cannot be read (:func:`regular`), or holds more.
    """
    if regular(path).stat().st_size > most_mb * 10**6:
        raise OSError(errno.EFBIG, f"more than {most_mb:,} MB", str(path))
    return path.read_bytes()


def shown(path: Path) -> Path:
    """Return a path as people are told it: short where it lies in the working directory."""
    with contextlib.suppress(ValueError, OSError):  # elsewhere; or the working directory is gone
        return path.relative_to(Path.cwd())
    return path


def refuse_unexpanded(place: str | Path, told: str) -> None:
    """Refuse a place that begins with ``~``: the shell expands it where it is a word of its own, and nobody else.

    Args:
        told: the option or key and its value.

    Raises:
        UserError: with the path that was meant.
    """
    if str(place).startswith("~"):
        raise UserError(f"{told}: would make a folder named ~; give {Path(place).expanduser()}")


def mapped(path: Path) -> bytes | mmap.mmap:
    """Return the bytes of a file; those that are looked at take memory, and not its length, of which a disk holds none.

    What is kept of them is to be copied: who cuts the file short would take them away.

    Raises:
        OSError: it cannot be read (:func:`regular`).
    """
    with regular(path).open("rb") as file:
        empty = not os.fstat(file.fileno()).st_size  # which cannot be mapped
        return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def open_tensors(path: Path) -> Any:
    """Return an open .safetensors file, a context; its tensors are in host memory.

    Raises:
        OSError: it cannot be read (:func:`regular`), or the memory has no room for it.
        SafetensorError: it is damaged.
    """
    from safetensors import safe_open  # late: few files are of tensors

    try:
        return safe_open(regular(path), "pt")
    except (MemoryError, RuntimeError) as error:  # of safetensors or of PyTorch, which map it
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error


def check_target(path: Path, option: str, *suffixes: str) -> None:
    """Refuse a file that is to be written where it would take the place of something of another kind.

    Raises:
        UserError: its name begins with ``~`` or has none of the suffixes, or a pipe, a device or a link is there; with
            the option.
    """
    refuse_unexpanded(path, f"{option} {path}")
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} {path}: would be no {suffixes[0]} by its name; give a name that ends so")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{option} {path}: a link, or no file; give a new name, or that of such a file")


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Write atomically: a reader sees the old file or the whole new one.

    The block writes to the hidden path beside ``path`` that it is given. What it wrote takes the place of ``path`` at
    its end; where it fails, nothing of it stays.

    Args:
        durable: have it on the disk first, so that a power loss, too, leaves one of the two.

    Raises:
        OSError: it cannot be written, with its name; also by safetensors, which has an error of its own for that.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # what a kill left
    try:
        yield partial
        if durable:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        from safetensors import SafetensorError  # late: few files are of tensors

        if isinstance(error, SafetensorError):
            raise _as_of_the_system(error, path) from error
        if isinstance(error, OSError) and error.errno and str(error.filename) in ("None", str(partial)):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def _as_of_the_system(error: Exception, path: Path) -> OSError:
    """Return the error of the operating system of which an error tells in words."""
    if number := re.search(r"os error (\d+)", str(error)):
        return OSError(int(number[1]), os.strerror(int(number[1])), str(path))
    return OSError(f"{path}: {error}")


def alone(path: Path) -> Path:
    """Return the path of a file that is about to be changed in place, which from now on has no other name (``cp -l``).

    Raises:
        OSError: it cannot be copied.
    """
    if path.stat().st_nlink > 1:
        with atomic_write(path) as partial:
            shutil.copyfile(path, partial)
    return path


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None where there is no file or it cannot be asked."""
    try:
        with regular(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: readers do not see each other
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def append_whole(file: RawIOBase, data: bytes) -> None:
    """Append to a file without a buffer, which may take a part of what it is given: all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    end = file.tell()
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        file.seek(end)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write :func:`atomic_write`."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's bytes."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha256(folder: Path) -> str:
    """Return the hex digest of the names and bytes of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    told = [f"{path.relative_to(folder)} {file_sha256(path)}" for path in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def whole_lines(path: Path, missing: str) -> Iterator[bytes]:
    """Return the lines of :func:`whole_blocks`, one by one."""
    for block in whole_blocks(path, missing):
        yield from block.split(b"\n")


def whole_blocks(path: Path, missing: str) -> Iterator[bytes]:
    """Return the lines of a file, compressed by xz if its name says so, but for a last one without its end.

    A block is about 1 MB of whole lines, with an end between two lines and none after the last.

    Args:
        missing: what to do where the file cannot be read.

    Raises:
        UserError: it cannot be read, what was compressed is damaged or holds more than 64 MB, or a line does. Lines
            before that are returned first.
    """
    begun: list[bytes] = []  # of a line
    try:
        with regular(path).open("rb") as file:
            for part in _unpacked(file, path) if path.suffix == ".xz" else iter(lambda: file.read(_CHUNK), b""):
                lines, end, rest = part.rpartition(b"\n")
                if end:
                    yield b"".join([*begun, lines])
                    begun.clear()
                begun.append(rest)
                if path.suffix != ".xz" and len(begun) * _CHUNK > _LARGEST_MB * 10**6:  # of those all are counted
                    raise UserError(f"{path}: a line of more than {_LARGEST_MB} MB; restore the file")
    except lzma.LZMAError as error:
        raise UserError(f"{path}: damaged ({error}); restore the file") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {missing}") from error


def _unpacked(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Return what was compressed, in parts; unlike ``lzma.open`` it refuses what follows a whole stream."""
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    size = 0
    while not unpacker.eof:
        packed = file.read(_CHUNK) if unpacker.needs_input else b""
        if unpacker.needs_input and not packed:
            raise lzma.LZMAError("cut short")
        part = unpacker.decompress(packed, _CHUNK)
        size += len(part)
        if size > _LARGEST_MB * 10**6:
            raise UserError(f"{path}: holds more than {_LARGEST_MB} MB; restore the file, or unpack it by xz -d")
        yield part
    if unpacker.unused_data or file.read(1):
        raise lzma.LZMAError("more than one file")
