"""Code of the user's own, named as ``FILE.py:NAME``. What fails in it is told with the user's line."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashpoint.errors import UserCodeError, UserError, nearest, open_closed_streams
from flashpoint.files import file_sha256

_LONGEST = 300  # characters of what an error says


def load(word: str, where: str) -> Any:
    """Run a Python file anew, but for what it imports, and return what it defines under a name.

    Args:
        word: ``FILE.py:NAME``.
        where: what the error begins with: the option or key and its value.

    Raises:
        UserError: there is no such file, it fails, or it does not define the name.
    """
    file, _, name = word.rpartition(":")
    if not Path(file).is_file():
        raise UserError(f"{where}: {file} is no file; give FILE.py:NAME of one that is there")
    spec = importlib.util.spec_from_file_location(f"flashpoint_user_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{where}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for what the file defines
    if (folder := str(Path(file).resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)  # the file may import others beside it, as with python FILE.py
    with errors_in_one_line(word, where):
        spec.loader.exec_module(module)
    if not hasattr(module, name):
        known = [other for other, value in vars(module).items() if getattr(value, "__module__", "") == spec.name]
        there = f"it has {', '.join(known)}" if known else "it defines no function and no class"
        raise UserCodeError(f"{where}: {Path(file).name} has no {name}; {nearest(name, known)}{there}")
    return getattr(module, name)


def file_digest(word: str) -> str:
    """Return the SHA-256 of the file of ``FILE.py:NAME``; nothing where the word names no file."""
    file = Path(word.rpartition(":")[0])
    return file_sha256(file) if file.is_file() else ""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let user's code in the block change neither the working directory of what follows, to which paths are relative,
    nor the number of processes: one that it forks ends here. Two would write one run. Streams that it closes lead
    nowhere."""
    process, folder = os.getpid(), os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)
        open_closed_streams()
        os.fchdir(folder)
        os.close(folder)


@contextmanager
def errors_in_one_line(word: str, where: str = "", hint: str = "") -> Iterator[None]:
    """Tell an error of the user's code in one line, with the last of the user's lines that it went through. What it
    leaves is :func:`undisturbed`.

    Args:
        word: ``FILE.py:NAME``.
        where: what the line begins with.
        hint: what it ends with.

    Raises:
        UserCodeError: of whatever the code in the block raises, but an interruption by the user.
    """
    file = word.rpartition(":")[0]
    try:
        with undisturbed():
            yield
    except (UserCodeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit and GeneratorExit, too
        line = error.lineno if isinstance(error, SyntaxError) and _is(error.filename, file) else None
        for frame in traceback.extract_tb(error.__traceback__):
            line = frame.lineno if _is(frame.filename, file) else line
        place = f"{file}:{line}" if line is not None else "" if where else file
        reason = textwrap.shorten(f"{type(error).__name__}: {_text(error)}", _LONGEST, placeholder=" …")
        raise UserCodeError(
            ": ".join([*filter(None, (where, place)), reason]) + (f"; {hint}" if hint else "")
        ) from error


def defined_at(function: Any, word: str) -> str:
    """Return ``FILE.py:LINE`` of a function of the user's; without the line where it has none."""
    file, code = word.rpartition(":")[0], getattr(function, "__code__", None)
    return file if code is None or not _is(code.co_filename, file) else f"{file}:{code.co_firstlineno}"


def _is(name: str | None, file: str) -> bool:
    return name is not None and Path(name).resolve() == Path(file).resolve()


def _text(error: BaseException) -> str:
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception as other:  # the user's error may have a faulty text, too
        return f"its text cannot be made ({type(other).__name__})"
    return text.encode(errors="backslashreplace").decode()
