"""Processes that work for this one, and end with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.context import SpawnContext, SpawnProcess
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_GRACE = 10
"""Seconds in which a process whose parent is gone may leave its with-blocks."""
_BEHIND = 10
"""Niceness of what is done in the background: as many processes as there are cores would slow the caller."""
_LOOK = 0.5
"""Seconds between looks whether the program has come to its end."""


@contextlib.contextmanager
def worker_processes(count: int, start: Callable[..., None], *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``count`` processes that end at once when the block fails or is interrupted, or when this process dies.

    Args:
        start: called in each process before its first work, with ``arguments``; :func:`follow_parent` is what it needs.
    """
    # spawn: a forked copy of tokenizers', Arrow's or CUDA's threads can deadlock.
    spawn = _SpawnContext()
    others, over = set(multiprocessing.active_children()), threading.Event()

    def end() -> None:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()

    with ProcessPoolExecutor(count, spawn, start, arguments) as pool:
        threading.Thread(target=_end_with_program, args=(over, end), daemon=True).start()
        try:
            yield pool
        except BaseException:
            _surely(end)  # a second Ctrl-C would leave them running, and the exit waits for them
            raise
    over.set()


class _Process(SpawnProcess):
    """A process that Ctrl-C does not reach before :func:`follow_parent` leaves it to the parent: while it imports, it
    would print a traceback."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which a new process inherits
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _SpawnContext(SpawnContext):
    Process = _Process


def _surely(do: Callable[[], None]) -> None:
    """Do something that may be done twice, also if Ctrl-C comes before it is switched off."""
    while True:
        try:
            with _without_ctrl_c():
                do()
            return
        except KeyboardInterrupt:
            continue


def _end_with_program(over: threading.Event, end: Callable[[], None]) -> None:
    """A second Ctrl-C can come even before the block has failed, and then only the program's end is left."""
    while not over.wait(_LOOK):
        if not threading.main_thread().is_alive():
            end()
            return


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def follow_parent() -> None:
    """Leave Ctrl-C, which reaches all processes, to the parent, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


@contextlib.contextmanager
def in_background(work: Callable[..., T], *arguments: Any) -> Iterator[Future[T]]:
    """Do ``work`` in a process of its own: a Python process computes in one thread at a time. The caller goes first
    where there are too few cores for both.

    Leaving the block waits for the process. Where the block fails, or this process dies, the other one is told to end.
    It leaves its with-blocks when it next runs Python, and so removes what it has not finished.

    Args:
        work: a function of a module that is quick to import.
    """
    with worker_processes(1, _start_background) as pool:
        yield pool.submit(_result_or_end, work, *arguments)


def _start_background() -> None:
    follow_parent()
    os.nice(_BEHIND)
    signal.signal(signal.SIGTERM, _leave_blocks)


def _leave_blocks(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _result_or_end(work: Callable[..., T], *arguments: Any) -> T:
    try:
        return work(*arguments)
    except SystemExit as error:  # which the pool would take for a result, and wait for more work
        os._exit(int(error.code or 0))


def _end_with_parent() -> None:
    """A killed parent tells its workers nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)
