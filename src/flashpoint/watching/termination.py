"""Signals that end the process of a watched loop: the run gets its outcome first, and the signal does what it did."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_KILLING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""They end a process without a word; Ctrl-C (SIGINT) raises KeyboardInterrupt, which leaves the loop's block."""


class Termination:
    """Has a run ended by a signal that kills the process, and lets it be killed then.

    A handler of the host program stays in its place, and so does a signal that is ignored. A second signal kills at
    once: what is to be read may lie on a device that hangs.

    Args:
        end: ends the run; it gets the name of the signal.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._process = os.getpid()

    def install(self) -> None:
        """Take the signals that nobody handles; in the main thread alone, as Python has it."""
        if _in_main_thread():
            self._process = os.getpid()
            for number in _KILLING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._take)

    def remove(self) -> None:
        """Give them back, as far as nobody else has taken them since."""
        if _in_main_thread():
            for number in _KILLING:
                if signal.getsignal(number) == self._take:
                    signal.signal(number, signal.SIG_DFL)

    def _take(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            if os.getpid() == self._process:  # not one that was forked from it
                self._end(signal.Signals(number).name)
        finally:
            os.kill(os.getpid(), number)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Hold back signals that would end the block, until its end: launchers send a second Ctrl-C after the terminal's.
    A second one in the block does not wait."""
    came: list[int] = []
    handlers: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            restore()
            signal.raise_signal(number)

    if _in_main_thread():
        for number in (signal.SIGINT, *_KILLING):
            if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN):
                handlers[number] = handler
                signal.signal(number, note)
    try:
        yield
    finally:
        restore()
        if len(came) == 1:
            signal.raise_signal(came[0])


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
