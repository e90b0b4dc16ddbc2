"""The process of a command: its output, and how it ends."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from flashpoint.errors import open_closed_streams, to_null_device

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Run a command: :func:`own_streams`, then the block, then :func:`quick_end`."""
    own_streams()
    with quick_end():
        yield


class LastingText(io.TextIOWrapper):
    """A stream for people: what cannot be written is dropped, with all that follows, and raises nothing.

    Whoever read it has gone (``| head``, ``| tee`` after Ctrl-C), its terminal has been closed, or its disk is full.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        with contextlib.suppress(OSError):
            stream.flush()
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
        self._instead_of = stream  # which closes the buffer when it goes

    def write(self, text: str, /) -> int:
        with self._dropping():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            super().flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            pass  # a full pipe that does not block: its reader comes back
        except OSError:
            to_null_device(self.fileno())  # what the buffer holds goes there, too, and what others write


def own_streams() -> None:
    """Give a command streams that raise nothing but what concerns it; call it before other files are opened.

    Those that were closed from the start (``2>&-``) become the null device: the next file that is opened would get
    their number, and what libraries write to stderr. Stderr is lasting. Where the encoding is ASCII, as in the locale
    ``C``, it becomes UTF-8. What another encoding lacks is escaped.
    """
    open_closed_streams()
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115, until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    sys.stderr = _lasting(sys.stderr)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Look for no cycles of objects in the block: imports and compilers make a million objects, nearly all of which
    stay, and each look goes over all of them."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def importing_pytorch() -> Iterator[None]:
    """Import PyTorch, and what needs it, in the block: :func:`without_collection`, and what is imported is left out of
    later looks, too.

    Where PyTorch is there already, nothing is left out: what an earlier run left behind is to be found.
    """
    if "torch" in sys.modules:
        yield
        return
    with without_collection():
        yield
        gc.freeze()


def make_stdout_lasting() -> None:
    """For a command whose work is not what it prints: it goes on where nobody reads stdout any more."""
    sys.stdout = _lasting(sys.stdout)


def _lasting(stream: TextIO) -> TextIO:
    """Return a lasting stream in place of one of this process's; one that a caller has put there stays."""
    return LastingText(stream) if type(stream) is io.TextIOWrapper else stream


@contextlib.contextmanager
def quick_end() -> Iterator[None]:
    """End the process, after the block, as Python does, but for its last act: freeing every object one by one.

    With PyTorch that takes seconds, for memory that the system takes back at once. Threads and functions of ``atexit``
    are waited for; only those registered before the block are left out. Text and bytes of
    files that are still open are written; compressed files are to be closed.

    An error that leaves the block, and a profiler or debugger, take Python's own end.
    """
    if sys.getprofile() or sys.gettrace():
        yield
        return
    status = 0

    def leave() -> None:
        """Run last: functions of ``atexit`` run in the reverse order of their registration."""
        gc.unfreeze()
        for file in [one for one in gc.get_objects() if type(one) in _FILES and one not in (sys.stdout, sys.stderr)]:
            with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
                file.flush()
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed from the start
                stream.flush()
        except (OSError, ValueError):  # Python's own end tells of it
            return
        os._exit(status)

    atexit.register(leave)
    try:
        yield
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        raise
    except BaseException:
        atexit.unregister(leave)
        raise
    finally:
        if inductor := sys.modules.get("torch._inductor.async_compile"):
            # It waits a second for its workers, which end by themselves once this process has.
            atexit.unregister(inductor.shutdown_compile_workers)
